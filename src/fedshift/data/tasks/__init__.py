"""Tasks beside classification and segmentation: how they are declared, read, learned and predicted."""
