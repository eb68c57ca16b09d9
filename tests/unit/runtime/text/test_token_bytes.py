"""The bytes of tokens: together they are the text, also where a character is spread over several."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from prejit.runtime.text.vocabulary import TokenBytes


def test_byte_level_tokens_are_bytes() -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    found = TokenBytes(made)
    for text in ("Hello, world\n", "größer 😀", "\0\x7f\u00a0"):
        assert b"".join(found[each] for each in made.encode(text).ids) == text.encode()
    assert found[made.token_to_id("<|end|>")] == b"<|end|>"


def test_pieces_of_sentencepiece_keep_their_space_and_their_bytes() -> None:
    vocabulary = ["<unk>", "<0xC3>", "<0xBC>", "\u2581Hello", "\u2581", "x"]
    made = Tokenizer(
        models.BPE({token: place for place, token in enumerate(vocabulary)}, [], unk_token="<unk>")
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    found = TokenBytes(made)
    assert [found[each] for each in range(1, 6)] == [b"\xc3", b"\xbc", b" Hello", b" ", b"x"]


def test_padding_of_a_vocabulary_has_no_bytes() -> None:
    made = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    assert TokenBytes(made)[7] == b""


def test_a_tokenizer_of_pieces_with_neighbours_has_bytes_all_the_same() -> None:
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    found = TokenBytes(made)
    assert [found[1], found[2]] == [b"play", b"##ing"]
