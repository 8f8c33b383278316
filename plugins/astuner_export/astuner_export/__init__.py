"""Export the results of a run: a trained model as a folder or file, or its episodes as data."""
