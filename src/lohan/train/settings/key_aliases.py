"""Names that other fine-tuning tools use, and ours for the same thing.

Owns the table only. `config` asks it before it looks for the nearest name, so that a person who
brings a file of another tool is told what to write.
"""

_ADAPTER = "use_peft, lora_r, lora_alpha and lora_target_modules"
_NONE_QUANTIZED = "nothing: weights are kept in 16 bits, none is quantized"
# Beginnings of names that all get the same answer.
_FAMILIES = {"peft_": _ADAPTER, "bnb_": _NONE_QUANTIZED}
_OURS = {
    # DeepSpeed
    "nvme_path": "offload: {ssd: DIRECTORY}",
    "offload_optimizer": "offload: {ssd: DIRECTORY} (the planner decides what is offloaded)",
    "offload_param": "offload: {ssd: DIRECTORY} (the planner decides what is offloaded)",
    "zero_optimization": "offload: {ssd: DIRECTORY} (there are no stages)",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_clipping": "max_grad_norm",
    "train_batch_size": "per_device_train_batch_size and gradient_accumulation_steps",
    "stage3_prefetch_bucket_size": "nothing: the planner sizes every buffer",
    "aio": "nothing: `lohan profile` finds the best settings of each drive",
    "activation_checkpointing": "nothing: the planner decides what is recomputed",
    # Axolotl
    "base_model": "model",
    "datasets": "data",
    "val_set_size": "eval_data",
    "test_datasets": "eval_data",
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "sequence_len": "max_length",
    "sample_packing": "packing",
    "eval_sample_packing": "eval_packing",
    "num_epochs": "num_train_epochs",
    "lr_scheduler": "lr_scheduler_type",
    "optimizer": "nothing: AdamW with fp32 states is what runs (adam_beta1, adam_beta2, "
    "adam_epsilon, weight_decay)",
    "train_on_inputs": "assistant_only_loss or completion_only_loss",
    "evals_per_epoch": "eval_strategy and eval_steps",
    "saves_per_epoch": "save_strategy and save_steps",
    "chat_template": "chat_template_path",
    "rl": "task",
    "rl_beta": "beta",
    "adapter": _ADAPTER,
    "lora_target_linear": "lora_target_modules: all-linear",
    "load_in_4bit": _NONE_QUANTIZED,
    "load_in_8bit": _NONE_QUANTIZED,
    "flash_attention": "model_init_kwargs: {attn_implementation: flash_attention_2}",
    # LLaMA-Factory
    "model_name_or_path": "model",
    "dataset": "data",
    "eval_dataset": "eval_data",
    "dataset_dir": "data (a path)",
    "cutoff_len": "max_length",
    "template": "chat_template_path",
    "train_on_prompt": "completion_only_loss: false",
    "mask_history": "assistant_only_loss",
    "preprocessing_num_workers": "dataset_num_proc",
    "finetuning_type": _ADAPTER,
    "lora_rank": "lora_r",
    "lora_target": "lora_target_modules",
    "quantization_bit": _NONE_QUANTIZED,
    "stage": "task",
    "pref_beta": "beta",
    "pref_loss": "loss_type",
    "do_train": "nothing: training is what runs",
    "do_eval": "eval_data and eval_strategy",
    "val_size": "eval_data",
    "overwrite_output_dir": "another out, or --resume",
    # TRL and transformers, older or of the script
    "lora_task_type": "nothing: a language model is what is trained (CAUSAL_LM)",
    "lora_target_parameters": "lora_target_modules (layers; parameters of experts are not taken)",
    "max_seq_length": "max_length",
    "output_dir": "out",
    "dataset_name": "data",
    "train_file": "data",
    "validation_file": "eval_data",
    "train_dataset": "data",
    "evaluation_strategy": "eval_strategy",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "warmup_ratio": "warmup_steps (a number below 1 is a share of all steps)",
    "no_cuda": "offload: {device: cpu}",
    "use_cpu": "offload: {device: cpu}",
    "resume_from_checkpoint": "--resume",
    "resume": "--resume",
    "torch_dtype": "bf16 or fp16",
    "dtype": "bf16 or fp16",
    "attn_implementation": "model_init_kwargs: {attn_implementation: ...}",
    # shorthand
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "batch": "per_device_train_batch_size",
    "grad_accum": "gradient_accumulation_steps",
    "clip_grad_norm": "max_grad_norm",
    "ssd": "offload: {ssd: DIRECTORY}, or --ssd DIRECTORY",
    "nvme": "offload: {ssd: DIRECTORY}, or --ssd DIRECTORY",
    "ram": "offload: {ram: 48GiB}, or --ram 48GiB",
    "ram_budget": "offload: {ram: 48GiB}",
    "vram_budget": "offload: {gpu: 20GiB}",
    "gpu": "offload: {gpu: 20GiB}, or --gpu 20GiB",
    "device": "offload: {device: cuda}, or --device cuda",
    "write_budget": "offload: {write_budget: 300TB}",
    "archive_steps": "offload: {archive_steps: 500}",
    "save_model_steps": "offload: {save_model_steps: 500}",
}


def our_name_for(name: str) -> str | None:
    """What to write in place of another tool's name; None if the name is not known."""
    asked = name.lower().replace("-", "_")
    for beginning, ours in _FAMILIES.items():
        if asked.startswith(beginning):
            return ours
    # Of nested names, such as zero_optimization.stage, the outermost is what is known.
    return _OURS.get(asked) or _OURS.get(asked.partition(".")[0])
