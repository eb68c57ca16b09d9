"""A loaded bundle by the interfaces of others: libraries for embeddings and chats, serverless platforms."""
