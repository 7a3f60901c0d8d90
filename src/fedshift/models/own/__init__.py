"""Networks that do not come with fedshift: users' own, and those of timm, torchvision and Hugging Face."""
