"""Fine-tuning on labelled images: `veca finetune`."""
