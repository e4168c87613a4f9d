//! Saved contents in files, as processes describe them to each other: their directory and their sizes.

use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A directory, as one process names it to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirName {
    /// Its path, absolute, in bytes.
    pub path: Vec<u8>,
    /// The filesystem that it is on, as the naming process sees it.
    pub device: u64,
    /// Its inode number there.
    pub inode: u64,
}

/// The reason why a directory cannot be used.
#[expect(missing_docs, reason = "messages name what the fields are")]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveDirError {
    /// The system refused.
    #[error("{operation} {} failed", path.display())]
    Io {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The directory for `sublet save` has files in it, perhaps of an earlier save. Nothing was written. Give an
    /// empty or a new directory.
    #[error("{} is not empty: give an empty or a new directory", path.display())]
    NotEmpty { path: PathBuf },
    /// Others could read or replace what is written there.
    #[error("{} {problem}", path.display())]
    NotPrivate {
        path: PathBuf,
        /// The problem, and the remedy.
        problem: String,
    },
    /// The command and the job see different directories under this name, as in two containers. Nothing was written.
    /// Mount one directory into all containers under one path.
    #[error(
        "{} is another directory for this process than for the one that asks: they see different filesystems, as \
         in containers; name one that both see",
        path.display()
    )]
    Elsewhere { path: PathBuf },
}

/// The memory of one process, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SaveAccount {
    /// Saved contents.
    pub saved_bytes: u64,
    /// Own memory that is away and whose contents nobody has: discarded, or unused.
    pub not_kept_bytes: u64,
    /// Own memory that is where it belongs, on its device or the host, and is not saved.
    pub in_place_bytes: u64,
    /// Memory of other processes.
    pub imported_bytes: u64,
}
