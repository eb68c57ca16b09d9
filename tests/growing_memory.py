"""Measure how memory grows: generated tokens, then sessions, in this process."""

import gc
import json
import random
import sys
from pathlib import Path

from prejit.runtime import Request, Sampling, load

POINTS = 10
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.9, top_k=20, seed=1),
    Sampling(temperature=1.1, top_p=0.9, seed=2, repetition_penalty=1.2),
    Sampling(frequency_penalty=0.5),
)


def private_bytes():
    gc.collect()
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in rollup[1:])
    return 1024 * sum(int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))


def measured(work, total):
    """Do so much work, which yields how much is done."""
    done, points = 0, list[int]()
    for done in work:
        if done >= total * (len(points) + 1) / POINTS:
            points.append(private_bytes())
        if done >= total:
            break
    return {"done": done, "bytes": points, "grown_bytes": points[-1] - points[0]}


def tokens(bundle, pick):
    """Keep the slots of a batch busy; yield the number of tokens so far."""
    decoder = bundle.decoder
    context, vocab = decoder.contexts[-1], decoder.decoder.vocab_size
    batch, count = bundle.batch(decoder.batches[-1]), 0
    while True:
        while batch.free:
            prompt = [pick.randrange(vocab) for _ in range(pick.randrange(1, context // 2))]
            options = {
                **{"max_new_tokens": pick.randrange(1, context // 2), "stop_token_ids": ()},
                **{"logprobs": pick.choice((None, None, None, 2))},
                **{"prompt_lookup": pick.random() < 0.3},
            }
            repeated = prompt * pick.choice((1, 1, 2))
            batch.insert(Request(repeated, pick.choice(SAMPLINGS), **options))
        given = batch.step()
        count += sum(token.token_id is not None for token in given)
        if pick.random() < 0.002:
            batch.evict(given[0].slot)
        if pick.random() < 0.0005:
            batch.close()
        yield count


def sessions(bundle, pick):
    """Run sessions of two turns, which are then closed, dropped, or left in the middle of a stream."""
    vocab, count = bundle.decoder.decoder.vocab_size, 0
    prefix = bundle.prefix([1, 2, 3, 4])
    while True:
        session = bundle.session()
        prompt = [1, 2, 3, 4, *(pick.randrange(vocab) for _ in range(pick.randrange(1, 12)))]
        first = session.generate(prompt, max_new_tokens=4, stop_token_ids=(), prefix=prefix)
        again = [*prompt, *first.token_ids, 5]
        stream = session.stream(again, max_new_tokens=8, stop_token_ids=())
        next(stream)
        ending = count % 3
        if ending == 0:
            list(stream)
            session.close()
        elif ending == 1:
            del stream
        count += 1
        yield count


def run(path, token_count, session_count):
    bundle = load(path, on_mismatch="error")
    bundle.prepare()
    return {
        "tokens": measured(tokens(bundle, random.Random(0)), token_count),
        "sessions": measured(sessions(bundle, random.Random(0)), session_count),
    }


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
