"""The entry of a worker process."""

from prejit.compiler.compile.worker.requests import main

if __name__ == "__main__":
    main()
