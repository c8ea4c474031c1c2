"""That it fits: models on devices of every size, and out of memory everywhere."""
