"""A TRL script on lohan: the import and the `offload` argument are all that changed.

    python examples/trl_script.py MODEL rows.jsonl SSD_DIRECTORY OUT

Run it again with --resume after it was stopped.
"""

import argparse

from datasets import load_dataset
from trl import SFTConfig

from lohan import SFTTrainer  # was: from trl import SFTTrainer


def main() -> None:
    """Train, and write the model to OUT."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("ssd")
    parser.add_argument("out")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--cpu", action="store_true", help="Compute on the processor.")
    words = parser.parse_args()

    trainer = SFTTrainer(
        model=words.model,
        args=SFTConfig(
            output_dir=words.out,
            max_steps=words.max_steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            learning_rate=1e-5,
            save_steps=20,
            use_cpu=words.cpu,
            report_to="none",
        ),
        train_dataset=load_dataset("json", data_files=words.rows, split="train"),
        offload={"ssd": words.ssd},  # new
    )
    trainer.train(resume_from_checkpoint=words.resume)
    trainer.save_model()
    trainer.close()


if __name__ == "__main__":
    main()
