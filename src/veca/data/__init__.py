"""From sources of images to batches of tensors: index, decoding loader, transforms, labelled datasets."""
