"""Fine-tuning: models in and out of Hugging Face's layout, and trainers on top of the engine."""
