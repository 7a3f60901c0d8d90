"""What a site's messages leak: attacks that reconstruct its samples."""
