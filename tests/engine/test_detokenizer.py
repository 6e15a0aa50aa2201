"""Text decoded token by token is the text decoded at once."""

import random

import pytest
import tiny_chat
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from kvkeep.engine.detokenizer import Answer


def sentencepiece():
    """Blanks lead, unknown characters are spelt in bytes, and a text loses its first blank: as Llama 2 has it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁Hello", "▁world", "Hello", "ing", ".", "▁▁", "é", "日"]
    words = Tokenizer(models.BPE({each: i for i, each in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    words.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def wordpiece():
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "[SEP]": 1, "play": 2, "##ing": 3, "it": 4, "é": 5}))
    words.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="[SEP]")


KINDS = {"bytes": tiny_chat.tokenizer(), "sentencepiece": sentencepiece(), "wordpiece": wordpiece()}


def unfolded(tokenizer, ids):
    text = Answer(tokenizer)
    return [text.add(each) for each in ids] + [text.finish()], text.text


def in_bytes(text):
    """A text as byte tokens of the sentencepiece above."""
    return [3 + byte for byte in text.encode()]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_make_up_the_text_decoded_at_once(kind):
    tokenizer, source = KINDS[kind], torch.Generator().manual_seed(0)
    for _ in range(200):
        ids = torch.randint(len(tokenizer), (30,), generator=source).tolist()
        if kind == "sentencepiece":  # whole characters: torn ones change the text before them, see below
            words = [[each] if each < 3 or each > 258 else in_bytes("é日🙂"[each % 3]) for each in ids]
            ids = [each for word in words for each in word]
        pieces, text = unfolded(tokenizer, ids)
        assert "".join(pieces) == text == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_in_the_end_is_the_one_decoded_at_once(kind):
    tokenizer, source = KINDS[kind], torch.Generator().manual_seed(1)
    for _ in range(200):
        ids = torch.randint(len(tokenizer), (30,), generator=source).tolist()
        assert unfolded(tokenizer, ids)[1] == tokenizer.decode(ids, skip_special_tokens=True)


def test_blanks_special_tokens_and_characters_in_parts():
    words = KINDS["sentencepiece"]
    known = words.convert_tokens_to_ids
    ids = [known(each) for each in ("▁Hello", "</s>", "▁world", "▁", "▁Hello", "ing")] + in_bytes("é")
    assert unfolded(words, ids)[0] == ["Hello", "", " world", " ", " Hello", "ing", "", "é", ""]


def test_a_token_costs_the_same_however_much_is_written():
    decoded = []

    class Counting:
        def decode(self, ids, **_):
            decoded.append(len(ids))
            return "".join(map(chr, ids))

    unfolded(Counting(), range(97, 1097))
    assert max(decoded[:-1]) <= 2 and sum(decoded) < 5000


def test_a_text_is_held_from_where_a_stop_may_begin():
    """As trying every place of the text's end against every stop says."""

    def tried(text, stops):
        places = range(len(text) + 1)
        return next(
            at for at in places if at == len(text) or any(s.startswith(text[at:]) and s != text[at:] for s in stops)
        )

    detokenizer, source = Answer(None), random.Random(0)
    for _ in range(2000):
        detokenizer.text, *stops = ("".join(source.choices("ab", k=source.randint(1, 7))) for _ in range(4))
        if not any(stop in detokenizer.text for stop in stops):
            assert detokenizer.held_from(stops) == tried(detokenizer.text, stops)
    assert detokenizer.held_from([]) == len(detokenizer.text)


def test_a_stop_is_found_where_it_ends_whatever_was_searched_before():
    draw = random.Random(0)
    for _ in range(300):
        one, stops = Answer(None), ["ab", "b\n", " ", "aba"][draw.randrange(4) :]
        for _ in range(12):
            before = len(one.text)
            one.text += "".join(draw.choice("ab \n") for _ in range(draw.randrange(3)))
            found = any(stop in one.text.lstrip() for stop in stops)
            assert one.has_stop(stops, before) == found
            if found:
                break


def test_stops_are_searched_for_at_the_end_alone():
    """A text that says how much of it was looked at."""

    class Text(str):
        looked = 0

        def find(self, stop, start):
            Text.looked += len(self) - start
            return super().find(stop, start)

    one = Answer(None)
    for _ in range(2000):
        before, one.text = len(one.text), Text(one.text + "word ")
        assert not one.has_stop(["###", "stop"], before)
    assert Text.looked < 2000 * 2 * 10
