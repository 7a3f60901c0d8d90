"""A network of your own: three-dimensional convolutions for small volumes. Any torch.nn.Module will do."""

from torch import nn


class SmallNet(nn.Module):
    """It is called with the shape of a sample, the number of classes, and the options of the experiment."""

    def __init__(self, input_shape, classes, width=8):
        super().__init__()
        self.early = nn.Sequential(nn.Conv3d(input_shape[0], width, 3, padding=1), nn.BatchNorm3d(width), nn.ReLU())
        self.late = nn.Sequential(nn.Conv3d(width, width, 3, stride=2, padding=1), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, volumes):
        """Scores (n, classes), before any softmax."""
        return self.head(self.late(self.early(volumes)).mean((2, 3, 4)))
