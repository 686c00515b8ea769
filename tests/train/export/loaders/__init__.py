"""What the loaders of engines that cannot run here make of a folder, as small tables read from their source."""
