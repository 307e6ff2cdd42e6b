//! Pictures: their files decode to what Pillow makes of them, and hostile files are refused within bounds.

mod decoding;
mod hostile;
mod resizing;
mod sources;
