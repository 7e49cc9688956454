"""Training: distillation from a frozen teacher, fine-tuning, and the run engine under both."""
