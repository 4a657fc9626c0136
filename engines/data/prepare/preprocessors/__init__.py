"""Published layouts of data sets, read into the row schema; one file per layout."""
