//! What other processes wrote, and what they put into directories: a terminal obeys none of it, no command waits for it,
//! and one bad item costs itself alone.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::{geteuid, mkfifo};
use sublet_tests::{Files, MIB, Outcome, Ran, Rank, Stage, Trouble, until};
use tenants::run_dir::MEMBERS_MAX;

/// The other user: any that is not ours, and that container runtimes map.
const OTHER_UID: u32 = 12_345;
/// Clears the line, sets the title of the window, goes on in a line that looks like one of ours.
const EVIL: &str = "kv\u{1b}[2K\r\u{1b}]0;T\u{7}\u{1b}[2J\u{202e}\u{200b}\nspoof  active";

fn stage_with_train() -> Outcome<(Stage, Rank)> {
    let stage = Stage::new(&[128 * MIB])?;
    let mut train = stage.hoard("train", &[], &[])?;
    train.do_it("create 0 4194304")?;
    Ok((stage, train))
}

/// Nothing in it does anything but stand there.
fn is_plain(ran: &Ran) -> bool {
    let plain = |text: &str| {
        let mut all = text.chars().filter(|c| *c != '\n');
        all.all(|c| !c.is_control() && !"\u{202e}\u{200b}\u{2066}\u{2028}".contains(c))
    };
    plain(&ran.stdout) && plain(&ran.stderr)
}

/// A process that claims to be of a tenant of `run_dir`, by its environment alone. Ended when dropped.
struct Pretender(Child);

impl Pretender {
    fn start(run_dir: &Path, tenant: &str, uid: Option<u32>) -> Outcome<Self> {
        let mut command = Command::new("sleep");
        command.arg("600").stdin(Stdio::null()).env("SUBLET_RUN_DIR", run_dir);
        command.env("SUBLET_TENANT", tenant).env("OTHER", "libsublet.so").current_dir("/");
        // The loader complains of a library that it does not find, and goes on.
        command.env("LD_PRELOAD", "libsublet.so").stderr(Stdio::null());
        if let Some(uid) = uid {
            command.uid(uid).gid(uid);
        }
        Ok(Self(command.spawn()?))
    }
}

impl Drop for Pretender {
    fn drop(&mut self) {
        // It may have ended.
        let _gone = self.0.kill();
        let _status = self.0.wait();
    }
}

#[test]
fn processes_with_names_that_are_none_are_not_shown() -> Outcome {
    let (stage, train) = stage_with_train()?;
    let dir = stage.run_dir_path();
    let evil = Pretender::start(&dir, EVIL.trim_start_matches("kv"), None)?;
    let path = Pretender::start(&dir, "../other", None)?;
    let good = Pretender::start(&dir, "early", None)?;
    for arguments in [["ps"].as_slice(), &["ps", "-v"]] {
        let shown = stage.sublet(arguments)?.succeeded()?;
        assert!(is_plain(&shown), "{shown:?}");
        let has = |child: &Pretender| shown.stdout.contains(&format!(" {} ", child.0.id()));
        assert!(has(&good) && !has(&evil) && !has(&path), "{shown:#?}");
        assert!(!shown.stdout.contains("spoof"), "{shown:#?}");
    }
    drop(train);
    Ok(())
}

#[test]
#[expect(clippy::print_stderr, reason = "a test that could not run says so")]
fn processes_of_other_users_are_not_looked_at() -> Outcome {
    let (stage, train) = stage_with_train()?;
    if !geteuid().is_root() {
        eprintln!("NOT RUN: only root may read what other users wrote");
        return Ok(());
    }
    let dir = stage.run_dir_path();
    let others = [EVIL, "early", "train"];
    let others: Outcome<Vec<_>> =
        others.iter().map(|name| Pretender::start(&dir, name, Some(OTHER_UID))).collect();
    let others = others?;
    let shown = stage.sublet(&["ps"])?.succeeded()?;
    assert!(is_plain(&shown), "{shown:?}");
    for other in &others {
        assert!(!shown.stdout.contains(&other.0.id().to_string()), "{shown:#?}");
    }
    let refused = stage.sublet(&["pause", "early"])?.exited(1)?;
    assert!(!refused.stderr.contains(&others[1].0.id().to_string()), "{refused:#?}");
    drop(train);
    Ok(())
}

#[test]
fn tags_and_command_lines_are_shown_and_obeyed_by_no_terminal() -> Outcome {
    let (stage, mut train) = stage_with_train()?;
    // The program takes words.
    let words: Vec<_> = EVIL.split_whitespace().collect();
    for tag in &words {
        train.do_it(&format!("tag {tag}"))?;
        train.do_it("create 0 4194304")?;
        train.do_it("untag")?;
    }
    for arguments in [["ps"].as_slice(), &["ps", "-v"], &["stats", "-v"], &["metrics"]] {
        let shown = stage.sublet(arguments)?.succeeded()?;
        assert!(is_plain(&shown), "{shown:?}");
    }
    let shown = stage.sublet(&["ps", "-v"])?.succeeded()?.stdout;
    assert!(shown.contains(r"\u001b]0;T\u0007\u001b[2J\u202e\u200b"), "{shown}");
    let shown = stage.sublet(&["metrics"])?.succeeded()?.stdout;
    assert!(shown.contains(r#"tag="\\u001b]0;T\\u0007\\u001b[2J\\u202e\\u200b""#), "{shown}");
    let shown = stage.sublet(&["ps", "--json"])?.succeeded()?;
    assert!(is_plain(&shown), "{shown:?}");
    let tags = &shown.json()?["tenants"][0]["members"][0]["member"]["tags"];
    assert!(tags.as_array().is_some_and(|tags| tags.iter().any(|tag| tag["tag"] == words[1])));

    let mut stopped = stage.command(&stage.files().sublet);
    stopped.args(["run", "--tenant", "stopped", "--library"]).arg(&stage.files().preload);
    stopped.arg("--").arg(Files::program("hoard")).arg(EVIL);
    let mut stopped = Rank::start(0, &mut stopped)?;
    stopped.answer()?;
    stopped.do_it("create 0 4194304")?;
    stopped.stop()?;
    let refused = stage.sublet(&["pause", "stopped", "--timeout", "1s"])?.exited(1)?;
    assert!(is_plain(&refused) && refused.stderr.contains("kill -CONT"), "{refused:?}");
    assert_eq!(refused.stderr.lines().count(), 1, "{refused:?}");
    let shown = stage.sublet(&["ps", "stopped"])?;
    assert!(is_plain(&shown), "{shown:?}");
    stopped.signal(Signal::SIGCONT)?;
    Ok(())
}

#[test]
fn pipes_in_the_place_of_files_of_turns_hold_no_command_up() -> Outcome {
    let stage = Stage::new(&[128 * MIB])?;
    let mut train = stage.hoard("train", &["--turns", "auto"], &[])?;
    train.do_it("create 0 4194304")?;
    stage.sublet(&["switch", "train"])?.succeeded()?;
    let turns = stage.run_dir_path().join(".turns");
    for name in ["history", "history.next", "silent", "log", "00000000000000ff.claim"] {
        let path = turns.join(name);
        fs::remove_file(&path).ok();
        mkfifo(&path, Mode::S_IRWXU)?;
        for words in [["turns"].as_slice(), &["ps"], &["switch", "train"], &["pause", "train"]] {
            let ran = stage.sublet(words)?;
            let is_refused = ran.code == Some(1) && ran.stderr.lines().count() == 1;
            assert!(ran.code == Some(0) || is_refused, "{name}: {words:?}: {ran:#?}");
        }
        stage.sublet(&["resume", "train"])?.succeeded()?;
        fs::remove_file(&path).ok();
    }
    train.do_it("create 0 4194304")?;
    Ok(())
}

#[test]
fn tenants_that_cannot_be_looked_at_are_named_and_the_others_shown() -> Outcome {
    let (stage, _train) = stage_with_train()?;
    let run_dir = stage.run_dir_path();
    let made = |name: &str, mode| -> Outcome<PathBuf> {
        let dir = run_dir.join(name);
        fs::create_dir(&dir)?;
        fs::set_permissions(&dir, Permissions::from_mode(mode))?;
        Ok(dir)
    };
    made("open", 0o755)?;
    symlink("/tmp", run_dir.join("link"))?;
    let crowd = made("crowd", 0o700)?;
    // One process that listens has all the names.
    let _listener = UnixListener::bind(crowd.join("0000000000000000.sock"))?;
    for id in 1..=MEMBERS_MAX {
        fs::hard_link(crowd.join("0000000000000000.sock"), crowd.join(format!("{id:016x}.sock")))?;
    }
    let reasons = [
        ("crowd", "more than 1024 live processes"),
        ("link", "is a symbolic link"),
        ("open", "is open to others (mode 755)"),
    ];
    for arguments in [["ps"].as_slice(), &["stats"], &["metrics"], &["ps", "--json"]] {
        let ran = stage.sublet(arguments)?.succeeded()?;
        assert!(ran.stdout.contains("train"), "{ran:#?}");
        assert_eq!(ran.stderr.lines().count(), reasons.len(), "{ran:#?}");
        for (tenant, why) in reasons {
            let mut lines = ran.stderr.lines();
            let is_said =
                |line: &str| line.contains(&format!("tenant '{tenant}'")) && line.contains(why);
            assert!(lines.any(is_said), "{ran:#?}");
        }
        if arguments.contains(&"--json") {
            let refused = &ran.json()?["refused"];
            for (index, (tenant, why)) in reasons.iter().enumerate() {
                assert_eq!(refused[index]["tenant"], *tenant);
                assert_eq!(refused[index]["code"], "run-dir");
                assert!(refused[index]["error"].as_str().is_some_and(|text| text.contains(why)));
            }
        }
    }
    Ok(())
}

#[test]
fn figures_are_written_to_files_alone_and_one_signal_ends_who_writes_them() -> Outcome {
    let (stage, _train) = stage_with_train()?;
    let shared = tempfile::tempdir()?;
    fs::set_permissions(shared.path(), Permissions::from_mode(0o1777))?;
    let path = |name: &str| -> Outcome<String> {
        let path = shared.path().join(name);
        path.to_str().map(str::to_owned).ok_or_else(|| Trouble::new("a path that is no text"))
    };
    let (pipe, link, file) = (path("pipe")?, path("link")?, path("file")?);
    mkfifo(Path::new(&pipe), Mode::S_IRWXU)?;
    symlink("/dev/null", &link)?;
    stage.sublet(&["pause", "train"])?.succeeded()?;
    for target in [&pipe, &link] {
        for words in [
            ["metrics", "--textfile", target].as_slice(),
            &["metrics", "--textfile", target, "--every", "1s"],
            &["trace", "train", "--output", target],
        ] {
            let ran = stage.sublet(words)?.exited(1)?;
            assert!(ran.stderr.contains("it is no regular file"), "{ran:#?}");
            assert_eq!(ran.stderr.lines().count(), 1, "{ran:#?}");
        }
    }
    stage.sublet(&["metrics", "--textfile", "/dev/null"])?.succeeded()?;
    let ran = stage.sublet(&["metrics", "--textfile", "/dev/stdout"])?.succeeded()?;
    assert!(ran.stdout.contains("sublet_device_bytes"), "{ran:#?}");

    let mut every = stage.command(&stage.files().sublet);
    every.args(["metrics", "--every", "1s", "--textfile", &file]);
    let mut every = Rank::start(0, &mut every)?;
    let limit = Duration::from_mins(1);
    until("a file", limit, || Ok(Path::new(&file).exists()))?;
    fs::remove_file(&file)?;
    mkfifo(Path::new(&file), Mode::S_IRWXU)?;
    every.complained("it is no regular file")?;
    every.signal(Signal::SIGTERM)?;
    assert!(every.ends_within(limit)?.success());
    Ok(())
}

#[test]
fn a_place_that_others_may_rename_takes_no_saved_contents() -> Outcome {
    let (stage, _train) = stage_with_train()?;
    stage.sublet(&["pause", "train"])?.succeeded()?;
    let base = tempfile::tempdir()?;
    let open = base.path().join("open");
    fs::create_dir(&open)?;
    symlink(&open, base.path().join("link"))?;
    fs::create_dir(open.join("inner"))?;
    fs::set_permissions(&open, Permissions::from_mode(0o777))?;
    for place in ["open/saved", "link/saved", "open/inner/saved"] {
        let place = base.path().join(place);
        let ran =
            stage.sublet(&["save".as_ref(), "train".as_ref(), place.as_os_str()])?.exited(2)?;
        assert!(ran.stderr.contains("lets others replace what lies in it"), "{ran:#?}");
        assert_eq!(ran.stderr.lines().count(), 1, "{ran:#?}");
        assert!(!place.exists());
    }
    for mode in [0o1777, 0o755] {
        fs::set_permissions(&open, Permissions::from_mode(mode))?;
        let place = open.join(format!("{mode:o}"));
        stage.sublet(&["save".as_ref(), "train".as_ref(), place.as_os_str()])?.succeeded()?;
    }
    Ok(())
}

#[test]
#[expect(clippy::print_stderr, reason = "a test that could not run says so")]
fn a_job_whose_directory_another_user_has_taken_says_who_and_what_to_do() -> Outcome {
    let (stage, _train) = stage_with_train()?;
    if !geteuid().is_root() {
        eprintln!("NOT RUN: only root may give a directory to another user");
        return Ok(());
    }
    let taken = stage.run_dir_path().with_file_name("taken");
    fs::create_dir(&taken)?;
    std::os::unix::fs::chown(&taken, Some(OTHER_UID), Some(OTHER_UID))?;
    let start = |required: &str| {
        let mut command = stage.command(&Files::program("hoard"));
        command.env("LD_PRELOAD", &stage.files().preload).env("SUBLET_TENANT", "early");
        command.env("SUBLET_RUN_DIR", &taken).env("SUBLET_REQUIRED", required);
        Rank::start(0, &mut command)
    };
    let owner = format!("{} belongs to user {OTHER_UID}, not 0", taken.display());
    let mut alone = start("0")?;
    alone.answer()?;
    alone.do_it("create 0 4194304")?;
    let ways = ["or have that user or root remove", "set SUBLET_RUN_DIR to another"];
    for said in ["this process is not under Sublet", &owner].iter().chain(&ways) {
        alone.complained(said)?;
    }
    let mut required = start("1")?;
    required.answer()?;
    required.say("create 0 4194304")?;
    assert_eq!(required.ends_within(Duration::from_mins(1))?.code(), Some(1));
    required.complained(&owner)?;
    Ok(())
}
