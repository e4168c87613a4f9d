//! Files that are written for other users to read.

use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use tempfile::Builder;

use crate::failure::{EXIT_UNCHANGED, Failure};

/// The permissions. Others read the files: `node_exporter` runs as its own user.
const MODE: u32 = 0o644;

/// Replaces the file at `path` by one with `text`, atomically: a reader sees the old or the new file. A path in `/dev`, such as
/// `/dev/stdout`, is written to directly. Other users may write to the directory, so any other path that is no regular file is
/// refused.
pub(crate) fn replace(path: &Path, text: &str) -> Result<(), Failure> {
    let is_device = path.starts_with("/dev/fd") || path.parent() == Some(Path::new("/dev"));
    let written = match fs::symlink_metadata(path) {
        _ if is_device => write_through(path, text),
        Ok(found) if !found.is_file() => Err(io::Error::other("it is no regular file")),
        Ok(_) | Err(_) => try_replace(path, text),
    };
    written.map_err(|error| failed(path, &error))
}

fn write_through(path: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new().append(true).open(path)?.write_all(text.as_bytes())
}

fn failed(path: &Path, error: &io::Error) -> Failure {
    let message = format!(
        "{} could not be written, and is as before: {error}; name a file in a directory that you may write to",
        path.display()
    );
    Failure::new(message, EXIT_UNCHANGED)
}

fn try_replace(path: &Path, text: &str) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    let dir = path.parent().filter(|dir| *dir != Path::new("")).unwrap_or(Path::new("."));
    // The temporary name does not end in `.prom`: node_exporter would read such a file.
    let prefix = format!(".{name}.");
    let mode = Permissions::from_mode(MODE);
    let mut file = Builder::new().prefix(&prefix).permissions(mode).tempfile_in(dir)?;
    file.write_all(text.as_bytes())?;
    // If the process is killed before this, one hidden file stays.
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    #[test]
    fn only_devices_that_are_named_are_written_to_and_pipes_and_links_are_refused_and_stay() {
        let base = tempfile::tempdir().unwrap();
        let target = base.path().join("target");
        fs::write(&target, "before").unwrap();
        let of = |name: &str| base.path().join(name);
        mkfifo(&of("pipe"), Mode::S_IRWXU).unwrap();
        symlink("pipe", of("to-pipe")).unwrap();
        symlink("/dev/null", of("to-device")).unwrap();
        symlink(&target, of("to-file")).unwrap();
        symlink("nowhere", of("to-nothing")).unwrap();
        fs::create_dir(of("dir")).unwrap();
        for name in ["pipe", "to-pipe", "to-device", "to-file", "to-nothing", "dir"] {
            let before = fs::symlink_metadata(of(name)).unwrap().file_type();
            let failure = replace(&of(name), "text").unwrap_err().to_string();
            assert!(failure.contains("it is no regular file"), "{failure}");
            assert_eq!(fs::symlink_metadata(of(name)).unwrap().file_type(), before);
        }
        assert_eq!(fs::read_to_string(&target).unwrap(), "before");
        replace(Path::new("/dev/null"), "text").unwrap();
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
