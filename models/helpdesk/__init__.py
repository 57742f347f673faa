"""Generated help-desk dialogues, on which the shipped model is trained and evaluated."""
