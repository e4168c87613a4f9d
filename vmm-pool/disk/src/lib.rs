//! Saved contents in files. A pool has [`file()`] make its own, which has no name; [`WriteOut`] writes what is saved to named ones,
//! which outlive the process.

mod file;
mod ring;
mod sums;
mod writeout;

pub use file::{check_file_dir, file};
pub use writeout::{WriteOut, Written};

#[cfg(test)]
mod tests;
