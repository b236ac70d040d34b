"""Files that come with the software and are read, not imported: `profiles` holds proof profiles (troth.calibrate.files)."""
