"""`lohan train --gpus 2`, and the commands that look at what it leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import tiny_chat
from support.command_line import run_lohan

LOHAN = Path(sys.executable).with_name("lohan")


@pytest.mark.slow
def test_two_ranks_train_one_model(tmp_path: Path) -> None:
    tiny_chat.save_model(tmp_path / "model")
    tiny_chat.tokenizer().save_pretrained(tmp_path / "model")
    rows = "".join(json.dumps(row) + "\n" for row in tiny_chat.conversations(8))
    (tmp_path / "rows.jsonl").write_text(rows)
    ssd, out = tmp_path / "ssd", tmp_path / "out"
    ssd.mkdir()
    words = f"""train --gpus 2 --model {tmp_path}/model --data {tmp_path}/rows.jsonl
        --ssd {ssd} --out {out} --device cpu --machine workstation-4090 --ram 256MiB --gpu 64MiB
        --max_steps 2 --per_device_train_batch_size 1 --gradient_accumulation_steps 2"""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([LOHAN, *words.split()], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done after 2 steps") == 1, "the first rank speaks"
    run = json.loads((out / "_lohan" / "run.json").read_text())["run_id"]
    assert {path.name for path in ssd.iterdir()} == {f"lohan-{run}.r{rank}of2" for rank in (0, 1)}

    checked = run_lohan("check", run, "--ssd", ssd)
    assert "states of a run of 2 ranks" in checked.stdout
    run_lohan("export", out, "--out", tmp_path / "exported")
    exported = (tmp_path / "exported" / "model.safetensors").read_bytes()
    assert exported == (out / "model.safetensors").read_bytes()
    refused = run_lohan("train", out, "--resume")
    assert refused.exit_code == 2
    assert "was made by 2 rank(s), and 1 want to go on with it" in refused.stderr
    run_lohan("clean", "--ssd", ssd, "--remove", run, "--yes")
    assert not list(ssd.iterdir())
