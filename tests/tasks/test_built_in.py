"""The built-in tasks: real data, the same every time, and they learn."""

from __future__ import annotations

import hashlib
import math
import sys
from pathlib import Path

import pytest
import torch

from ampwise.capability import Measurement, classify, hardware
from ampwise.errors import MissingExtraError, TaskError
from ampwise.tasks import load_task
from ampwise.tasks.charlm import SIZES, Transformer, _split, fitting, standard_library
from ampwise.tasks.checks import build, first_batch, samples_in

CPU = torch.device("cpu")


def trained(task, epochs: int = 1):
    model, optimizer = build(task, CPU, 0)
    for _ in range(epochs):
        for batch in task.batches():
            task.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


def same(first, again) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# -- charlm ------------------------------------------------------------------------------------------


def test_charlm_reads_the_standard_library_and_records_its_digest():
    texts = standard_library()
    info = load_task("charlm").info
    assert info["corpus_bytes"] == sum(map(len, texts)) > 1_000_000
    training = b"".join(text for index, text in enumerate(texts) if index % 10)
    digest = hashlib.sha256(training + b"".join(texts[::10])).hexdigest()
    assert info["corpus_sha256"] == digest


def test_charlm_epochs_are_the_same_each_time_whatever_the_global_seed():
    first = list(load_task("charlm", {"batches": "3"}).batches())
    torch.manual_seed(99)
    task = load_task("charlm", {"batches": "3"})
    assert len(first) == 3
    assert same(first, task.batches())
    assert same(first, task.batches())
    assert not same(first, load_task("charlm", {"batches": "3", "seed": "1"}).batches())


def test_charlm_counts_bytes_and_trains_on_windows_with_their_next_byte():
    task = load_task("charlm", {"context": "16", "batch": "3"})
    batch = first_batch(task)
    assert (batch.shape, batch.dtype) == ((3, 17), torch.int64)
    assert samples_in(task, batch) == 3 * 16


def test_charlm_held_out_loss_starts_at_ignorance_and_sinks():
    task = load_task("charlm", {"batches": "40", "context": "64", "batch": "4"})
    before = task.evaluate(build(task, CPU, 0)[0].eval())
    after = task.evaluate(trained(task))
    assert before["loss"] == pytest.approx(math.log(256), abs=0.5)
    assert after["loss"] < 3.3  # a uniform guess is 5.5; byte frequencies alone give about 3.2
    assert 0 <= before["accuracy"] <= after["accuracy"] <= 1


def test_the_decoder_does_not_look_ahead():
    model = Transformer(SIZES["tiny"]).eval()
    text = torch.randint(0, 256, (1, 32))
    changed = text.clone()
    changed[0, 20:] = 7
    with torch.no_grad():
        difference = (model(text) - model(changed)).abs().amax(dim=(0, 2))
    # the arithmetic of a row does not depend on the rows after it, up to the order of sums
    assert difference[:20].max() < 1e-5
    assert difference[20] > 1e-3


@pytest.mark.parametrize(
    ("size", "parameters"), [("tiny", 445_952), ("small", 3_290_624), ("base", 19_177_472)]
)
def test_sizes(size, parameters):
    with torch.device("meta"):
        model = Transformer(SIZES[size])
    assert sum(each.numel() for each in model.parameters()) == parameters


def test_dropout_is_off_by_default_and_random_when_asked():
    assert not torch.equal(*_two_passes("0.5"))
    assert torch.equal(*_two_passes("0"))


def _two_passes(dropout: str):
    task = load_task("charlm", {"dropout": dropout, "context": "8"})
    model, _ = build(task, CPU, 0)
    batch = first_batch(task)
    return task.loss(model, batch), task.loss(model, batch)


@pytest.mark.parametrize(
    "setting", [("batch", "0"), ("batches", "0"), ("context", "-1"), ("dropout", "1")]
)
def test_charlm_settings_that_make_no_sense(setting):
    with pytest.raises(TaskError, match=r"expected (a )?positive"):
        load_task("charlm", dict([setting]))


# -- text:PATH ---------------------------------------------------------------------------------------


def test_text_trains_on_a_file():
    Path("book.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    task = load_task("text:book.txt", {"batches": "25", "context": "32", "batch": "8"})
    assert task.info["corpus_bytes"] == 4400
    assert task.evaluate(trained(task))["loss"] < 2.7  # its byte frequencies alone give 3.1


def test_text_of_a_folder_is_all_its_files_in_the_order_of_their_paths():
    for name in ("b/two.txt", "a/one.txt"):
        Path(name).parent.mkdir()
        Path(name).write_text(name * 300)
    digest = hashlib.sha256(b"a/one.txt" * 300 + b"b/two.txt" * 300).hexdigest()
    assert load_task("text:.", {"context": "32"}).info["corpus_sha256"] == digest


def test_a_huge_file_among_small_ones_is_not_held_out_whole():
    training, held_out = _split([b"x" * 100_000, *[b"y" * 100] * 19])
    assert (len(training), len(held_out)) == (91_710, 10_190)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.txt", "no such file or folder"),
        ("empty.txt", "it is empty"),
        ("nothing", "it is empty"),
        ("short.txt", "too short: 100 bytes, expected at least 1290"),
    ],
)
def test_texts_that_cannot_be_trained_on(path, message):
    Path("empty.txt").touch()
    Path("nothing").mkdir()
    Path("short.txt").write_text("x" * 100)
    with pytest.raises(TaskError) as raised:
        load_task(f"text:{path}")
    assert message in str(raised.value)


def test_the_length_asked_for_is_enough():
    Path("enough.txt").write_bytes(b"x" * 1290)
    assert first_batch(load_task("text:enough.txt")).shape == (8, 129)


# -- digits ------------------------------------------------------------------------------------------


def test_digits_reach_their_accuracy_in_five_epochs():
    task = load_task("digits")
    torch.manual_seed(0)
    metrics = task.evaluate(trained(task, epochs=5))
    assert metrics["accuracy"] > 0.96
    assert metrics["loss"] < 0.3


def test_digits_order_follows_the_seed_and_never_shows_a_held_out_image():
    task = load_task("digits")
    epochs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        epochs.append(torch.cat([images for images, _ in task.batches()]))
    assert torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[0], epochs[2])
    assert len(epochs[0]) == 1437 // 64 * 64


@pytest.mark.parametrize("setting", [("batch", "0"), ("batch", "1438"), ("width", "0")])
def test_digits_settings_that_make_no_sense(setting):
    with pytest.raises(TaskError, match="expected a batch of 1 to 1437"):
        load_task("digits", dict([setting]))


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"needs scikit-learn: .*install.*\[digits\]"):
        load_task("digits")


@pytest.mark.parametrize(
    ("flags", "times", "size"),
    [({"avx512f", "avx512_bf16"}, 3.0, "small"), ({"avx512f"}, 0.5, "tiny")],
)
def test_a_cpu_is_given_a_size_at_which_it_shows_what_it_can(flags, times, size):
    measured = dict.fromkeys(hardware.PROBED, Measurement(1024, times, times, times))
    known = hardware.cpu(frozenset(flags), "AVX512")
    assert fitting(classify(known, measured | {"tf32": Measurement()})) == size


def test_an_accelerator_is_given_a_size_that_keeps_it_busy():
    assert fitting(classify(hardware.cuda("cuda:0", "H100", (9, 0)), {})) == "base"
