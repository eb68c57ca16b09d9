"""Commands that tests run to their end."""

import subprocess


def ran(*command, status=0, **options):
    """Run a command and return what it printed. Its exit status must be `status`; None: any."""
    words = [*map(str, command)]
    given = {"capture_output": True, "text": True, "timeout": 600, **options}
    done = subprocess.run(words, check=False, **given)
    assert status in (None, done.returncode), f"{words}\n{done.stdout}\n{done.stderr}"
    return done
