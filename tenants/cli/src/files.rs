//! Files that are written for others to read.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use crate::failure::{EXIT_UNCHANGED, Failure};

/// Others read them: `node_exporter` runs as a user of its own.
const MODE: u32 = 0o644;

/// Puts a file with `text` in the place of `path` atomically: a reader sees the one before or this one. What is no file, such as
/// `/dev/stdout`, is written to.
pub(crate) fn replace(path: &Path, text: &str) -> Result<(), Failure> {
    let written =
        if is_special(path) { write_through(path, text) } else { try_replace(path, text) };
    written.map_err(|error| failed(path, &error))
}

/// A device or a pipe, or a link to one, which must stay what it is; so must `/dev/stdout`, whatever it leads to.
fn is_special(path: &Path) -> bool {
    let is_none = fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir());
    is_none || path.starts_with("/dev/fd") || path.parent() == Some(Path::new("/dev"))
}

fn write_through(path: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new().append(true).open(path)?.write_all(text.as_bytes())
}

fn failed(path: &Path, error: &io::Error) -> Failure {
    let message = format!(
        "{} could not be written, and is as before: {error}; it must be a file in a directory that you may write to",
        path.display()
    );
    Failure::new(message, EXIT_UNCHANGED)
}

/// The name of what will be in the place of `path`.
fn temporary(path: &Path) -> io::Result<PathBuf> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    // Not `*.prom`, which node_exporter would read.
    Ok(path.with_file_name(format!(".{name}.{}", std::process::id())))
}

fn try_replace(path: &Path, text: &str) -> io::Result<()> {
    let file = temporary(path)?;
    let written = write(&file, text).and_then(|()| fs::rename(&file, path));
    if written.is_err() {
        // Should it stay, it is one hidden file.
        fs::remove_file(&file).ok();
    }
    written
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    // One that a killed process of the same number left behind would be in the way, and a link that somebody else put there must not
    // be followed.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(MODE).open(path)?;
    file.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_to_a_device_stays_and_is_written_to() {
        let base = tempfile::tempdir().unwrap();
        let link = base.path().join("link");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        replace(&link, "text").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert!(is_special(Path::new("/dev/stdout")));
    }

    #[test]
    fn a_file_is_replaced_atomically_or_stays() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("sublet.prom");
        replace(&path, "one").unwrap();
        replace(&path, "two").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two");
        assert_eq!(fs::read_dir(base.path()).unwrap().count(), 1);
        let missing = base.path().join("none/sublet.prom");
        let failure = replace(&missing, "x").unwrap_err();
        assert!(failure.to_string().contains("none/sublet.prom"), "{failure}");
        assert!(replace(base.path(), "x").is_err(), "a directory was replaced");
        assert!(replace(Path::new("/"), "x").is_err());
    }
}
