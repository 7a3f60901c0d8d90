"""Your images: one folder per site, and in it one folder per class. Here they are made up: bright and dark squares."""

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import fedshift


def make_images(folder: Path) -> None:
    """Write ten images of two classes for each of three cameras, which differ in brightness."""
    rng = np.random.default_rng(0)
    for camera, light in (("porch", 0), ("garden", 30), ("street", 60)):
        for number in range(10):
            label = ("bright", "dark")[number % 2]
            pixels = rng.integers(0, 80, (16, 16)) + light + (90 if label == "bright" else 0)
            (folder / camera / label).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / camera / label / f"{number}.png")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_images(folder)
        results = fedshift.run(
            {
                "name": "your_images",
                "data": {"name": "image_folder", "root": folder, "size": 16},
                "protocol": {"targets": ["street"], "seeds": [0]},
                "model": {"name": "mnist_cnn"},
                "training": {"rounds": 2, "batch_size": 8, "lr": 0.05},
                "methods": [{"name": "fedavg"}],
            }
        )
        print(results)
        model = results.model()
        print(model.predict(folder / "street"))  # a folder, one image, or an array (n, height, width)
        print(model.export("torchscript", "exported").file)
