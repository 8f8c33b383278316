"""What a run made, for others to use: a trained model as a folder, its episodes as data."""
