"""Help-desk dialogues from a seed: the text that the shipped model is trained and examined on."""
