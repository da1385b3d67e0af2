"""TRL's and transformers' trainers over the engine: one mixin, its saving, resuming and evaluating.

Owns where the trainers' hooks meet the engine. Reads no settings file and makes no folder of its
own. Imported by `fine_tune` and as `lohan.SFTTrainer` and `lohan.Trainer`.
"""
