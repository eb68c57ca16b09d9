"""The entry of a worker process."""

from prejit.compiler.compile.worker.worker_requests import main

if __name__ == "__main__":
    main()
