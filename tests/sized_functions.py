"""Functions that look at a size while they are traced. A build tries the numbers in their file: few."""

TABLE = {64: 2.0, 128: 3.0}
LIMIT = 96


def matched(x):
    match x.shape[0]:
        case 48:
            return -x
        case _:
            return x


LOOKS_AT_A_SIZE = {
    "equal": lambda x: x * 2 if x.shape[0] == 100 else x,
    "named": lambda x: x * 2 if x.shape[0] == LIMIT else x,
    "member": lambda x: x * 2 if x.shape[0] in (32, 40) else x,
    "even": lambda x: x * 2 if x.shape[0] % 2 == 0 else x,
    "multiple": lambda x: x * 2 if x.shape[0] % 16 == 0 else x,
    "looked-up": lambda x: x * TABLE.get(x.shape[0], 1.0),
    "integer": lambda x: x / x.shape[0] if isinstance(x.shape[0], int) else x,
    "matched": matched,
}

LOOKS_BELOW_EIGHT = {
    "below": lambda x: x * 2 if x.shape[0] < 5 else x,
    "five": lambda x: x * 2 if x.shape[0] == 5 else x,
    "third": lambda x: x + x.shape[0] % 3,
}


def only_eight(x):
    if x.shape[0] not in (8, 16):  # variables are found by doubling them
        raise ValueError("not 8")
    return x
