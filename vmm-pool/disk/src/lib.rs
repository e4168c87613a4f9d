//! Saved contents in files. [`file()`] makes a pool's own file, which has no name. [`WriteOut`] writes saved contents
//! to named files, which outlive the process.

mod file;
mod ring;
mod sums;
mod writeout;

pub use file::{check_file_dir, file};
pub use writeout::{WriteOut, Written};

#[cfg(test)]
mod tests;
