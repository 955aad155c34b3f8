"""Where rows come from: files of JSON, tables, folders, the hub."""
