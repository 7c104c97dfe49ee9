"""Reading pickles and archives of ``torch.save`` as data: nothing that a file names is called."""
