"""Sending a model to the hub: the files the export wrote and a model card, and nothing else.

Owns what leaves the machine. OUT also holds rows, settings, logs and states, so transformers' own
way of sending the folder is never taken. Mixed into the trainers by `saving`.
"""

import glob
import pathlib
from typing import Any

from lohan.train.weights.file_list import MODEL_LIST_NAME, read_list
from lohan.working_folder import working_folder

CARD_NAME = "README.md"
# For the type checker: a mixin has whatever the trainer it is put before has.
_SomeTrainer: Any = object


class PushingMixin(_SomeTrainer):  # type: ignore[misc]
    """Pushing for `SavingMixin`."""

    @property
    def out(self) -> pathlib.Path:
        """The output folder."""
        return pathlib.Path(self.args.output_dir)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Write the model and send it; arguments and result are transformers'."""
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
        self.save_model(_internal_call=True)
        if not self.is_first:
            return None
        return self.send_model(
            commit_message, blocking=blocking, token=token, revision=revision, **kwargs
        )

    def send_model(
        self,
        commit_message: str | None = "End of training",
        *,
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **card: Any,
    ) -> Any:
        """Send the model that `save_model` wrote into OUT, with a card. May block: yes.

        Raises:
            CheckpointError: no model was written there.
            Whatever the hub's client raises.
        """
        from huggingface_hub import HfApi

        names = [*read_list(working_folder(self.out) / MODEL_LIST_NAME), CARD_NAME]
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        card.setdefault("model_name", (self.args.hub_model_id or self.out.name).split("/")[-1])
        tags = card.get("tags") or []
        tags = [tags] if isinstance(tags, str) else list(tags)
        tags += [tag for tag in getattr(self.model, "model_tags", None) or () if tag not in tags]
        self.create_model_card(**{**card, "tags": tags})
        hub: Any = HfApi()
        return hub.upload_folder(
            repo_id=self.hub_model_id,
            folder_path=self.out,
            allow_patterns=[glob.escape(name) for name in names],
            commit_message=commit_message,
            token=token if token is not None else self.args.hub_token,
            revision=revision if revision is not None else self.args.hub_revision,
            run_as_future=not blocking,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Nothing: a seal has no model to send, and an archive holds the states of the run."""
