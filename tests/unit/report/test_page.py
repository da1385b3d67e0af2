"""The report of a run: everything that is there, an honest note for what is not."""

import html.parser
import json
import os
import pathlib
import shutil
from dataclasses import replace

import pytest

from lohan.errors import ConfigError
from lohan.report import write_report
from lohan.report.page import report_html
from lohan.report.run_files import read_run
from lohan.trace import Span, Trace, chrome_json
from lohan.vocabulary import Lane
from support.run_folders import measured_trace, write_log, write_run_folder

VOID = {"meta", "link", "br", "input"}
MOST_BYTES = 2_000_000


class Sound(html.parser.HTMLParser):
    """Checks that elements are closed in order, ids are unique, and nothing is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.ids: list[str] = []
        self.referred: list[str] = []
        self.words = ""
        self.scripts: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        assert not {key for key in named if key.startswith("on")}, f"<{tag}> runs a script"
        for key in ("src", "href", "xlink:href", "data", "srcset", "action"):
            assert (named.get(key) or "#").startswith(("#", "data:,")), f"<{tag}> fetches something"
        if "id" in named:
            self.ids.append(str(named["id"]))
        for key in ("aria-labelledby", "href"):
            value = str(named.get(key) or "")
            if key == "aria-labelledby" or value.startswith("#"):
                self.referred += value.replace("#", "").split()
        if tag == "script":
            self.scripts.append(named)
        if tag not in VOID:
            self.opened.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.opened and self.opened[-1] not in ("script", "style"):
            self.words += data


def sound(path: pathlib.Path) -> Sound:
    text = path.read_text(encoding="utf-8")
    assert text.isascii()
    assert len(text) < MOST_BYTES
    found = Sound()
    found.feed(text)
    found.close()
    assert found.opened == []
    assert len(found.ids) == len(set(found.ids))
    assert set(found.referred) <= set(found.ids)
    assert "url(" not in text
    assert "@import" not in text
    assert [one.get("type") for one in found.scripts].count(None) == 1
    return found


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_run_folder(tmp_path_factory.mktemp("whole") / "out")


@pytest.fixture
def folder(tmp_path: pathlib.Path, whole_folder: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(whole_folder, tmp_path / "out"))


def test_the_page_holds_everything_the_files_do(folder: pathlib.Path) -> None:
    path = write_report(folder)
    assert path == folder / "report.html"
    words = sound(path).words
    for expected in (
        "SmolLM2-135M-Instruct",
        "Loss, last logged",
        "evaluation loss",
        "Learning rate",
        "Predicted: steps 2 to 3",
        "Measured: steps 2 to 3",
        "measured is 7% slower",
        "Seconds per step",
        "SSD bytes per second",
        "states in two slots",
        "of the drives' rated life",
        "It fits: 9.1 GiB of 12.0 GiB RAM",
        "lr_scheduler_type",
        '["/mnt/a", "/mnt/b"]',
        "desktop-4090",
        "2.13.0",
    ):
        assert expected in words, expected
    assert "not recorded (no usable" not in words
    assert words.index("Predicted: steps") < words.index("Measured: steps")


def test_it_starts_with_what_limited_the_run_and_what_would_help(folder: pathlib.Path) -> None:
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    # Nothing was worked out: runs of older releases.
    words = sound(write_report(folder)).words
    assert "ssd_write limited this run (in 91% of its steps)." in words.replace("Ssd", "ssd")
    assert words.index("limited this run") < words.index("Loss, last logged")
    advice = [{"change": "twice the drives", "factor": 1.6}]
    path.write_text(json.dumps({**summary, "advice": advice}))
    assert "twice the drives would make it 1.6x as fast (simulated)." in (
        sound(write_report(folder)).words
    )
    broken = [7, {"change": 1, "factor": 2}, {"change": "<b>", "factor": "x"}]
    path.write_text(json.dumps({**summary, "advice": broken}))
    assert "limited this run" in sound(write_report(folder)).words


def test_secrets_in_the_configuration_stay_out(folder: pathlib.Path) -> None:
    text = write_report(folder).read_text()
    assert "hf_very_secret" not in text
    assert "(not shown)" in text


def test_where_the_folder_lies_stays_out(folder: pathlib.Path) -> None:
    assert str(folder.parent) not in write_report(folder).read_text()


def test_a_model_folder_is_named_by_its_last_part(folder: pathlib.Path) -> None:
    (folder / "summary.json").write_text('{"model": "/home/somebody/models/tiny-llama/"}')
    text = write_report(folder).read_text()
    assert "<h1>tiny-llama</h1>" in text
    assert "somebody" not in text


FILES = {
    "log.jsonl": "Loss: not recorded (no usable log.jsonl)",
    "plan.json": "The ledger: not recorded (no usable plan.json)",
    "plan.txt": "The plan: not recorded (no usable plan.txt)",
    "trace.json": "Measured lanes: not recorded (no usable trace.json)",
    "predicted_trace.json": "Predicted lanes: not recorded (no usable predicted_trace.json)",
    "machine.json": "The machine: not recorded (no usable machine.json)",
    "summary.json": "There is no usable summary.json",
    "lohan.yaml": "The resolved configuration: not recorded",
}


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_said_and_the_rest_is_shown(folder: pathlib.Path, name: str) -> None:
    (folder / name).unlink()
    assert FILES[name] in sound(write_report(folder)).words


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("plan.txt", "lohan.yaml")])
@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"", b"[]", b"[" * 90_000])
def test_a_damaged_file_is_said_and_the_rest_is_shown(
    folder: pathlib.Path, name: str, content: bytes
) -> None:
    (folder / name).write_bytes(content)
    words = sound(write_report(folder)).words
    assert FILES[name] in words
    if content and name != "log.jsonl":
        assert f"{name} is not used" in words


@pytest.mark.parametrize("name", FILES)
def test_each_file_alone_makes_a_page(folder: pathlib.Path, name: str) -> None:
    alone = folder.parent / "alone"
    alone.mkdir()
    (folder / name).rename(alone / name)
    sound(write_report(alone))


def test_a_run_that_was_killed_while_it_wrote_its_log(folder: pathlib.Path) -> None:
    log = folder / "log.jsonl"
    log.write_bytes(log.read_bytes()[:-7])
    (folder / "summary.json").unlink()
    words = sound(write_report(folder)).words
    assert "the last line is cut short" in words
    assert "still going on, or it was stopped before its end" in words


def test_every_file_cut_anywhere_still_makes_a_page(folder: pathlib.Path) -> None:
    for name in FILES:
        content = (folder / name).read_bytes()
        for share in (0.3, 0.999):
            (folder / name).write_bytes(content[: int(len(content) * share)])
            sound(write_report(folder))
        (folder / name).write_bytes(content)


def test_a_nan_is_seen_in_the_headline_and_in_the_chart(folder: pathlib.Path) -> None:
    with (folder / "log.jsonl").open("a") as file:
        file.write('{"step": 301, "loss": NaN}\n')
    words = sound(write_report(folder)).words
    assert "nan" in words
    assert "1 value(s) are not finite" in words


def test_files_cannot_put_markup_into_the_page(folder: pathlib.Path) -> None:
    nasty = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u2028\ud800\x00'\""
    (folder / "summary.json").write_text(
        json.dumps({"model": nasty, "ended": nasty, "versions": {nasty: nasty}})
    )
    (folder / "lohan.yaml").write_text(nasty.replace("\ud800", ""))
    (folder / "plan.txt").write_text(nasty.replace("\ud800", ""))
    plan = json.loads((folder / "plan.json").read_text())
    plan["policy"] = nasty
    plan["ledger"].append({"tier": "RAM", "purpose": nasty, "bytes": 5})
    (folder / "plan.json").write_text(json.dumps(plan))
    trace = Trace(
        name=nasty.replace("\ud800", ""),
        is_simulated=False,
        spans=(
            Span(lane=Lane.GPU, name=nasty, kind=nasty, start_seconds=0, end_seconds=1),
            Span(lane=Lane.GPU, name=nasty, kind=nasty, start_seconds=1, end_seconds=2, step=1),
        ),
    )
    (folder / "trace.json").write_text(chrome_json(trace))
    with (folder / "log.jsonl").open("a") as file:
        line = {"step": 301, "bottleneck": nasty, "busy_gpu": nasty}
        file.writelines(json.dumps({**line, "step": 301 + n}) + "\n" for n in range(2000))
    found = sound(write_report(folder))
    assert "alert(1)" in found.words
    assert "<script>alert" not in (folder / "report.html").read_text()


@pytest.mark.slow
def test_a_log_of_a_hundred_thousand_lines_makes_a_small_page_with_its_peaks(
    folder: pathlib.Path,
) -> None:
    log = folder / "log.jsonl"
    write_log(log, 100_000, eval_every=100)
    lines = log.read_text().splitlines()
    row = json.loads(lines[54_321])
    lines[54_321] = json.dumps({**row, "loss": 3.777, "grad_norm": 3.5})
    log.write_text("\n".join(lines) + "\n")
    found = sound(write_report(folder))
    assert '"3.777"' in (folder / "report.html").read_text()
    assert "of 100,000 logged steps" in found.words


@pytest.mark.slow
def test_a_trace_of_a_hundred_thousand_spans_makes_a_small_page(folder: pathlib.Path) -> None:
    spans = tuple(
        Span(
            lane=lane,
            name=f"a rather long name of a task {n}",
            start_seconds=n * 0.01,
            end_seconds=n * 0.01 + 0.004,
            kind=("forward", "backward", "P16", "G16")[n % 4],
            step=n // 800,
            rank=rank,
        )
        for rank in range(4)
        for lane in Lane
        for n in range(3_600)
    )
    (folder / "trace.json").write_text(
        chrome_json(Trace(name="run", is_simulated=False, spans=spans))
    )
    sound(write_report(folder))


def test_settings_without_end_do_not_burst_the_page(folder: pathlib.Path) -> None:
    (folder / "lohan.yaml").write_text("".join(f"setting_{n}: {'x' * 5000}\n" for n in range(3000)))
    (folder / "plan.txt").write_text("word " * 100_000)
    assert "letters)" in sound(write_report(folder)).words


@pytest.mark.slow
def test_everything_too_large_at_once_still_makes_a_small_page(folder: pathlib.Path) -> None:
    huge = "\U0001f600" * 5_000
    busy = {f"busy_{huge[:99]}{lane}": 0.5 for lane in range(20)}
    write_log(folder / "log.jsonl", 20_000)
    with (folder / "log.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"step": 20_001 + n, **busy, "bottleneck": huge}) + "\n" for n in range(999)
        )
    (folder / "lohan.yaml").write_text(f"{huge}: {huge}\n" * 300)
    summary = {"model": huge, "ended": huge, "versions": {f"{n}{huge}": huge for n in range(50)}}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "plan.txt").write_text(huge * 2)
    ledger = [{"tier": "RAM", "purpose": f"{n}{huge}", "bytes": n} for n in range(100)]
    (folder / "plan.json").write_text(json.dumps({"ledger": ledger, "policy": huge}))
    spans = tuple(
        Span(lane=Lane.GPU, name=huge, kind=f"{n}{huge}", start_seconds=n, end_seconds=n + 1)
        for n in range(40)
    )
    trace = Trace(name=huge, is_simulated=False, spans=spans)
    (folder / "trace.json").write_text(chrome_json(trace))
    assert "too large to be drawn here" in sound(write_report(folder)).words


def test_a_configuration_as_text_is_shown_without_its_secrets(folder: pathlib.Path) -> None:
    (folder / "lohan.yaml").write_text(
        "model: some/model\nhub_token: hf_secret\noffload:\n  - api_key: '1234'\n  ram: <b>\n"
    )
    path = write_report(folder)
    words = sound(path).words
    assert "model: some/model" in words
    assert "ram: <b>" in words
    assert words.count("(not shown)") == 2
    assert "hf_secret" not in path.read_text()
    assert "1234" not in words


def test_a_measured_trace_in_its_plain_form_is_read_too(folder: pathlib.Path) -> None:
    run = read_run(folder)
    assert run.predicted is not None
    (folder / "trace.json").write_text(measured_trace(run.predicted).to_json())
    assert "Measured: steps 2 to 3" in sound(write_report(folder)).words


def test_totals_of_the_summary_go_before_those_of_the_log(folder: pathlib.Path) -> None:
    assert "Written to SSD, about" in sound(write_report(folder)).words
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"written_bytes": 5 * 10**12, "read_bytes": 6 * 10**12, "peak_bytes": {"RAM": 2**31}}
    (folder / "summary.json").write_text(json.dumps(summary))
    words = sound(write_report(folder)).words
    assert "Written to SSD, about" not in words
    assert "5.0 TB" in words


def test_odd_values_in_known_places_are_no_reason_to_fail(folder: pathlib.Path) -> None:
    (folder / "summary.json").write_text('{"seconds": "x", "peak_bytes": 3, "versions": [1]}')
    ledger = [3, {"tier": "MOON"}, {"tier": "RAM", "purpose": 3, "bytes": 1}]
    ledger += [{"tier": "RAM", "purpose": "x", "bytes": -4}, {"tier": ["RAM"], "bytes": 1}]
    plan = {"ledger": ledger, "policy": 3, "batch": "x", "model": None}
    (folder / "plan.json").write_text(json.dumps(plan))
    sound(write_report(folder))
    (folder / "plan.json").write_text('{"ledger": {"tier": 3}}')
    sound(write_report(folder))


def test_no_run_folder_is_an_error_that_says_what_is_missing(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        write_report(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"none of log\.jsonl, .* is in it"):
        write_report(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="it is a file"):
        write_report(tmp_path / "file")


def test_a_failed_write_leaves_the_old_report(folder: pathlib.Path) -> None:
    write_report(folder)
    before = (folder / "report.html").read_bytes()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(folder, out=folder / "none" / "report.html")
    assert (folder / "report.html").read_bytes() == before
    assert [path for path in os.listdir(folder) if path.startswith(".")] == []


def test_the_same_files_make_the_same_page(folder: pathlib.Path) -> None:
    run = read_run(folder)
    assert report_html(run) == report_html(run)
    assert report_html(replace(run, remarks=("one",))) != report_html(run)


def test_a_file_that_cannot_be_read_is_said(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_bytes = pathlib.Path.read_bytes

    def refuse(path: pathlib.Path) -> bytes:
        if path.name == "summary.json":
            raise PermissionError(13, "Permission denied")
        return read_bytes(path)

    monkeypatch.setattr(pathlib.Path, "read_bytes", refuse)
    assert "summary.json is not used: Permission denied" in sound(write_report(folder)).words


def test_a_bottleneck_is_counted_whatever_its_share_of_each_step(tmp_path: pathlib.Path) -> None:
    named = ["GPU compute (97% of the step)", "GPU compute (93% of the step)", "SSD writes (90%)"]
    lines = [{"step": step, "bottleneck": text} for step, text in enumerate([*named, named[0]], 1)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = sound(write_report(tmp_path)).words
    assert "GPU compute" in words
    assert "in 75% of the logged steps" in words


def test_the_page_names_date_and_rows_and_explains_its_words(tmp_path: pathlib.Path) -> None:
    folder = write_run_folder(tmp_path / "run", 5)
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"ended": "2026-05-04T03:02:01+0000", "data": ["/home/me/chat.jsonl", "more.csv"]}
    (folder / "summary.json").write_text(json.dumps(summary))
    page = report_html(read_run(folder))
    head = page[page.index("<header>") : page.index("</header>")]
    assert "rows of chat.jsonl, more.csv" in head
    assert "2026-05-04" in head
    assert "/home/me" not in page
    for word in ("P16", "G16", "P32", "OS32", "A16", "seal", "lane"):
        assert f"<th scope=row>{word}</th>" in page


def test_answers_to_sample_prompts_stand_side_by_side(folder: pathlib.Path) -> None:
    assert 'id="answers"' not in report_html(read_run(folder))
    with (folder / "log.jsonl").open("a") as log:
        for step, answer in ((0, "<b>Nobody</b>"), (9_999, "Pip")):
            samples = [{"prompt": "Who are you?", "answer": answer}, "odd", {"prompt": 3}]
            log.write(json.dumps({"step": step, "samples": samples}) + "\n")
    words = sound(write_report(folder)).words
    for expected in ("before training", "after step 9,999", "Who are you?", "<b>Nobody</b>", "Pip"):
        assert expected in words
