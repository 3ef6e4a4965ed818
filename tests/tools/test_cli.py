"""The command: exit statuses, one clear message, JSON and nothing else, and nothing imported before its time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from latentscan.ir.errors import CheckpointError
from latentscan.tools import cli
from latentscan.tools.cli import BAD_INPUT, CHECK_FAILED, OK, main, stdout

ENTRY = "import sys; from latentscan.tools.cli import main; sys.exit(main())"


@pytest.fixture
def command(capsys, monkeypatch):
    """Run the command here: (status, stdout, stderr)."""
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist's workers may see a narrow one

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(a) for a in arguments])
        out = capsys.readouterr()
        return status, out.out, out.err

    return run


def process(*arguments: object, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", ENTRY, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_help_imports_neither_torch_nor_transformers():
    script = (
        "import sys; from latentscan.tools.cli import main; status = main(['--help']);"
        "print(status, sorted({'torch', 'transformers', 'sympy', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.split(maxsplit=1)[0] == "0"
    assert "torch" not in done.stderr and "transformers" not in done.stderr and "sympy" not in done.stderr
    for verb in ("passes", "explain", "plan", "dump", "diff", "convert"):
        assert verb in done.stdout


def test_passes_lists_every_pass(command):
    from latentscan.passes.pipeline import REGISTRY

    status, out, _ = command("passes")
    assert status == OK
    assert [line.split()[0] for line in out.splitlines()[1:]] == list(REGISTRY)
    told = json.loads(command("passes", "--json")[1])
    assert [row["name"] for row in told["passes"]] == list(REGISTRY)
    assert all(row["tier"] and row["summary"] for row in told["passes"])


def test_explain_tells_math_options_and_order(command):
    status, out, _ = command("explain", "mla-absorb")
    assert status == OK
    for words in ("absorb iff", "when=flops", "flops, always, never", "comes after: mha-to-mla", "arXiv 2405.04434"):
        assert words in out
    told = json.loads(command("explain", "latent-cache", "--json")[1])
    assert told["options"] == [] and told["graphs"] == "graphs that fill a cache"


def test_plan_prints_tables_or_json_and_nothing_else(command):
    arguments = ("plan", "tiny:deepseek_v3", "--pipeline", "mla-mm-split,mla-absorb", "--seq", 128, "--batch", 2)
    status, out, err = command(*arguments)
    assert status == OK and not err
    for words in ("model.layers.0..1.self_attn", "prefill: expand, decode: absorb", "KV cache a token", "192 B"):
        assert words in out
    done = process(*arguments, "--json")
    out, err = done.communicate()
    told = json.loads(out)
    assert done.returncode == OK and not err
    assert out == json.dumps(told, sort_keys=True, indent=2) + "\n"
    assert (told["schema"], told["batch"], told["seq"]) == (1, 2, 128)


def test_explaining_a_plan_unfolds_refusals_with_their_values(command):
    status, out, _ = command("plan", "tiny:llama", "-p", "latent-cache", "--explain")
    assert status == BAD_INPUT  # nothing would be rewritten
    assert "model.layers.0.self_attn" in out and "model.layers.1.self_attn" in out
    assert "64 elements per token" in " ".join(out.replace("│", " ").split())
    assert "prefill by kind of node" in out


BAD = {
    "unknown pass": (("plan", "tiny:llama", "-p", "mla-absrb"), "did you mean mla-absorb"),
    "unknown option": (("plan", "tiny:llama", "-p", "mla-absorb{wen=always}"), "did you mean when"),
    "wrong type": (("plan", "tiny:llama", "-p", "mha-to-mla{rank=many}"), "rank='many' is not a whole number"),
    "wrong order": (
        ("plan", "tiny:llama", "-p", "mla-absorb,latent-cache"),
        "latent-cache must come before mla-absorb",
    ),
    "rank too large": (
        ("plan", "tiny:llama", "-p", "mha-to-mla{rank=999,rope_dim=8}"),
        "rank=999 is larger than 56",
    ),
    "no directory": (("plan", "/nowhere/at/all"), "there is no such directory"),
    "unknown family": (("plan", "tiny:lama"), "did you mean llama"),
    "nothing to convert": (("convert", "tiny:llama", "{tmp}/new", "-p", "latent-cache"), "refused every place"),
    "no calibration": (
        ("convert", "tiny:llama", "{tmp}/new", "-p", "mha-to-mla{rank=24,rope_dim=8}"),
        "needs calibration",
    ),
    "no calibration file": (
        ("convert", "tiny:llama", "{tmp}/new", "-p", "mha-to-mla{rank=24,rope_dim=8}", "--calibration", "/nowhere.txt"),
        "/nowhere.txt: cannot be read",
    ),
    "no weights": (("convert", "{data}/config.json", "{tmp}/new", "-p", "mla-mm-split"), "no weights here"),
    "foreign directory": (
        ("convert", "tiny:llama", "{tmp}", "-p", "mha-to-mla,latent-cache"),
        "is not empty, and latentscan did not make it",
    ),
    "no dump": (("diff", "{tmp}"), "is no dump"),
    "a name too long": (("plan", "a" * 5000), "name too long"),
    "a file name too long": (("plan", f"/{'a' * 5000}.gguf"), "name too long"),
    "a dump to nowhere": (("dump", "tiny:gpt2", "-p", "mla-absorb", "--out", "/proc/x"), "/proc/x: cannot be written"),
    "a conversion to nowhere": (("convert", "tiny:gpt2", "/proc/x/y", "-p", "mla-absorb"), "cannot be written"),
    "a dump with a name too long": (
        ("dump", "tiny:gpt2", "-p", "mla-absorb", "--out", "{tmp}/" + "a" * 250),
        "cannot be written: File name too long",
    ),
    "no cache": (("convert", "tiny:mamba2", "{tmp}/new", "-p", "latent-cache"), "found no cache"),
    "an empty calibration file": (
        ("convert", "tiny:llama", "{tmp}/new", "-p", "mha-to-mla{rank=24,rope_dim=8}", "--calibration", "/dev/null"),
        "/dev/null: the calibration text is empty",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_status_2(command, tmp_path, case):
    (tmp_path / "mine.txt").write_text("mine")
    arguments, words = BAD[case]
    places = {"tmp": tmp_path, "data": Path(__file__).parents[1] / "data" / "deepseek_v3"}
    given = [a.replace("{tmp}", str(places["tmp"])).replace("{data}", str(places["data"])) for a in arguments]
    status, out, err = command(*given)
    assert status == BAD_INPUT
    assert words in err and err.startswith("latentscan: ")
    assert err.count("\n") == 1 and not out
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    "arguments", [("plan",), ("nonsense",), ("plan", "tiny:llama", "--sqe", "3"), ("plan", "tiny:llama", "--seq", "x")]
)
def test_wrong_usage_is_status_2(command, arguments):
    status, out, err = command(*arguments)
    assert status == BAD_INPUT and not out
    assert "Usage" in err and "Traceback" not in err


def test_a_failed_check_is_status_1_and_a_bug_a_traceback(command, monkeypatch):
    from latentscan.ir.errors import NumericsError, VerifyError

    for error in (NumericsError("moved by 3"), VerifyError("broken")):

        def fail(_: str, error=error) -> None:
            raise error

        monkeypatch.setattr("latentscan.runtime.source.resolve", fail)
        status, _, err = command("plan", "tiny:llama")
        assert (status, err) == (CHECK_FAILED, f"latentscan: {error}\n")

    def bug(_: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("latentscan.runtime.source.resolve", bug)
    with pytest.raises(ZeroDivisionError):
        main(["plan", "tiny:llama"])


@pytest.mark.parametrize(
    ("end", "status", "told"),
    [("full", BAD_INPUT, "latentscan: [Errno 28] No space left on device\n"), ("pipe", OK, "")],
)
@pytest.mark.parametrize("arguments", [("passes",), ("passes", "--json")])
def test_output_that_cannot_be_written_is_no_failed_check(tmp_path, arguments, end, status, told):
    """A full disk is told; a reader that has had enough (``| head``) is no error."""
    command = [sys.executable, "-m", "latentscan.tools.cli", *arguments]
    if end == "full":
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        found = done.returncode, done.stderr
    else:
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(command, cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
        os.close(write)
        found = done.returncode, done.stderr
    assert found == (status, told)


def test_debug_shows_the_traceback(monkeypatch):
    from latentscan.ir.errors import LatentscanError

    assert main(["plan", "/nowhere/at/all"]) == BAD_INPUT
    with pytest.raises(LatentscanError):
        main(["plan", "/nowhere/at/all", "--debug"])
    with pytest.raises(LatentscanError):
        main(["--debug", "plan", "/nowhere/at/all"])


def test_dump_and_diff(command, tmp_path):
    status, out, _ = command("dump", "tiny:deepseek_v3", "-p", "mla-mm-split,mla-absorb", "--out", tmp_path / "d")
    assert status == OK and (tmp_path / "d" / "index.md").is_file() and str(tmp_path) in out.replace("\n", "")
    status, out, _ = command("diff", tmp_path / "d", "mla-mm-split")
    assert status == OK and "kv_b_proj" in out


def test_convert_makes_a_model_that_loads(command, tmp_path):
    import torch

    from latentscan.runtime.checkpoint import load

    text = tmp_path / "text.txt"
    text.write_text("".join(map(chr, range(32, 127))) * 40)  # bytes are tokens: more kinds than the rank
    out = tmp_path / "new"
    arguments = (
        "convert",
        "tiny:llama",
        out,
        "-p",
        "mha-to-mla{rank=24,rope_dim=8},latent-cache",
        "--calibration",
        text,
        "--json",
    )
    status, printed, err = command(*arguments)
    assert status == OK and not err
    told = json.loads(printed)
    assert told["files"] == len(list(out.iterdir())) and told["reads_as_plain_model"] is False
    weights = told["weights"]
    assert weights["after"] - weights["before"] == weights["made"] - weights["released"]
    model = load(out)
    with torch.no_grad():
        assert model(input_ids=torch.ones(1, 5, dtype=torch.long)).logits.isfinite().all()
    assert command(*arguments)[0] == OK  # over its own earlier work


def test_convert_tells_of_growing_weights_before_it_writes(command, tmp_path, monkeypatch):
    """Factors of a large rank are bigger than what they replace: said while nothing is there yet."""
    import latentscan.tools.convert as module

    text, out = tmp_path / "text.txt", tmp_path / "new"
    text.write_text("".join(map(chr, range(32, 127))) * 40)  # bytes are tokens: more kinds than the rank

    def stop(*_: object, **__: object) -> None:
        raise CheckpointError("the disk is full", where=str(out))

    monkeypatch.setattr(module, "write", stop)
    pipeline = "mha-to-mla{method=pca,rank=48,rope_dim=8},latent-cache"
    status, printed, err = command("convert", "tiny:llama", out, "-p", pipeline, "--calibration", text)
    assert status == BAD_INPUT and "the disk is full" in err and not out.exists()
    assert "weights grow: " in printed
    assert "mha-to-mla makes 49.00 KiB in place of 32.00 KiB" in printed.replace("\n", " ")


def test_convert_takes_the_tokenizer_along(command, tmp_path):
    from latentscan.runtime.checkpoint import load
    from latentscan.tests.models import build

    source = tmp_path / "source"
    build("llama").save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    (source / "notes.md").write_text("not a part of the model")
    assert command("convert", source, tmp_path / "new", "-p", "mha-to-mla,latent-cache")[0] == OK
    assert (tmp_path / "new" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "new" / "notes.md").exists()
    (tmp_path / "new" / "mine.txt").write_text("mine")
    load(tmp_path / "new").save_pretrained(tmp_path / "new")  # the same model's: its tokenizer stays
    assert (tmp_path / "new" / "tokenizer.json").read_text() == "{}"
    assert command("convert", "tiny:gpt2{num_hidden_layers=1}", tmp_path / "new", "-p", "mha-to-mla")[0] == OK
    assert not (tmp_path / "new" / "tokenizer.json").exists()  # another model's
    assert (tmp_path / "new" / "mine.txt").read_text() == "mine"
    status, _, err = command("convert", tmp_path / "new", tmp_path / "again", "-p", "mha-to-mla,latent-cache")
    assert status == BAD_INPUT and "converted by latentscan already" in err
    status, _, err = command("convert", source, source, "-p", "mha-to-mla,latent-cache")
    assert status == BAD_INPUT and "would be overwritten" in err


@pytest.mark.slow
@pytest.mark.parametrize("files", [0, 1, 3, 6])
def test_a_killed_convert_leaves_nothing_or_a_complete_directory(tmp_path, files):
    """The real command, killed when so many files lie in what will become the directory."""
    out = tmp_path / "here" / "new"
    out.parent.mkdir()
    script = (
        "import sys; from latentscan.tools import convert as c; from latentscan.tools.cli import main;"
        "from functools import partial; c.convert = partial(c.convert, shard='60KB'); sys.exit(main())"
    )
    pipeline = "mha-to-mla,latent-cache"
    arguments = ["convert", "tiny:llama{num_hidden_layers=8}", str(out), "-p", pipeline]
    child = subprocess.Popen([sys.executable, "-c", script, *arguments], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while child.poll() is None and time.monotonic() < deadline:
        beside = [p for p in out.parent.iterdir() if p.name.startswith(".new.latentscan-aside")]
        if out.exists() or (beside and len(list(beside[0].iterdir())) >= files):
            child.send_signal(signal.SIGKILL)
            break
    child.wait()
    assert child.returncode == -signal.SIGKILL
    if out.exists():
        from latentscan.runtime.checkpoint import load

        load(out)
    else:
        assert main(arguments) == OK
    assert (out / "latentscan.json").is_file()
    assert sorted(p.name for p in out.parent.iterdir()) == ["new"]


def test_the_console_script_is_main():
    from importlib.metadata import entry_points

    found = [e for e in entry_points(group="console_scripts") if e.name == "latentscan"]
    for entry in found:
        assert entry.value == "latentscan.tools.cli:main"
    assert cli.main is main


def test_names_between_colons_are_not_turned_into_pictures(capsys):
    stdout().print("tiny:llama: and :rocket:")
    assert capsys.readouterr().out.strip() == "tiny:llama: and :rocket:"
