"""What several ops share: the token runs of each modality, the implementation choice, argument checks."""
