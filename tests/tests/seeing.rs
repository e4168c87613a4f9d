//! What `sublet ps`, `metrics`, `trace` and `man` show of real processes.

use std::fs::{self, File, Permissions};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::pty::{Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};
use serde_json::Value;
use sublet_tests::{JobOptions, MIB, Outcome, Rank, Stage, Trouble};

const CAPACITIES: [u64; 2] = [128 * MIB; 2];
const TIMEOUT: Duration = Duration::from_mins(2);
const SIZE: Winsize = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };

/// `sublet` in a terminal of its own.
struct Terminal {
    child: Child,
    ours: File,
    /// Kept open: the end of the last holder would end the terminal.
    _theirs: OwnedFd,
    shown: vt::Screen,
}

impl Terminal {
    fn start(stage: &Stage, words: &[&str]) -> Outcome<Self> {
        let pty = openpty(&SIZE, None)?;
        // Else the command would hold this side of its own terminal.
        fcntl(&pty.master, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        let mut command = stage.command(&stage.files().sublet);
        command.args(words).env("TERM", "xterm").env_remove("NO_COLOR");
        let end = || -> Outcome<Stdio> { Ok(pty.slave.try_clone()?.into()) };
        command.stdin(end()?).stdout(end()?).stderr(end()?);
        let child = command.spawn()?;
        Ok(Self { child, ours: pty.master.into(), _theirs: pty.slave, shown: vt::Screen::new() })
    }

    /// Takes in what is written until the screen has these words.
    fn until_shown(&mut self, words: &str) -> Outcome {
        let deadline = Instant::now() + TIMEOUT;
        while !self.shown.text().contains(words) {
            if Instant::now() >= deadline {
                return Err(Trouble::new(format!("no {words} on:\n{}", self.shown.text())));
            }
            self.read_some()?;
        }
        Ok(())
    }

    /// Takes in what is there, or comes within a moment.
    fn read_some(&mut self) -> Outcome {
        let mut polled = [PollFd::new(self.ours.as_fd(), PollFlags::POLLIN)];
        if poll(&mut polled, PollTimeout::from(100_u8))? == 0 {
            return Ok(());
        }
        let mut bytes = [0; 4096];
        let count = self.ours.read(&mut bytes)?;
        self.shown.take(&bytes[..count]);
        Ok(())
    }

    /// Its exit code.
    fn left(&mut self) -> Outcome<Option<i32>> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status.code());
            }
            if Instant::now() >= deadline {
                return Err(Trouble::new("it does not leave"));
            }
            self.read_some()?;
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // Both fail only when it has ended and been waited for.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// As much of a terminal as is needed to read what is drawn on one.
mod vt {
    /// 80 by 24 cells.
    pub(super) struct Screen {
        cells: Vec<Vec<char>>,
        row: usize,
        column: usize,
        /// What has begun with an escape character, as far as it has come.
        escape: Option<String>,
        /// Bytes of a character that has not come wholly.
        partial: Vec<u8>,
    }

    impl Screen {
        pub(super) fn new() -> Self {
            Self {
                cells: vec![vec![' '; 80]; 24],
                row: 0,
                column: 0,
                escape: None,
                partial: Vec::new(),
            }
        }

        pub(super) fn text(&self) -> String {
            let lines = self.cells.iter().map(|line| line.iter().collect::<String>());
            lines.map(|line| line.trim_end().to_owned() + "\n").collect()
        }

        pub(super) fn take(&mut self, bytes: &[u8]) {
            self.partial.extend_from_slice(bytes);
            let whole = match std::str::from_utf8(&self.partial) {
                Ok(text) => text.len(),
                Err(error) => error.valid_up_to(),
            };
            let rest = self.partial.split_off(whole);
            let text = String::from_utf8(std::mem::replace(&mut self.partial, rest));
            for character in text.unwrap_or_default().chars() {
                self.put(character);
            }
        }

        fn put(&mut self, character: char) {
            if let Some(mut escape) = self.escape.take() {
                escape.push(character);
                let goes_on = escape == "[" || !character.is_ascii_alphabetic();
                if goes_on {
                    self.escape = Some(escape);
                } else {
                    self.obey(&escape);
                }
                return;
            }
            match character {
                '\x1b' => self.escape = Some(String::new()),
                '\r' => self.column = 0,
                '\n' => self.row = (self.row + 1).min(23),
                _ => {
                    if let Some(cell) = self.cells[self.row].get_mut(self.column) {
                        *cell = character;
                    }
                    self.column += 1;
                }
            }
        }

        fn obey(&mut self, escape: &str) {
            let inner = escape.trim_start_matches('[');
            let (numbers, action) = inner.split_at(inner.len() - 1);
            let mut parts = numbers.split(';').map(|part| part.parse::<usize>().unwrap_or(0));
            match (numbers, action) {
                ("2" | "", "J") => self.cells = vec![vec![' '; 80]; 24],
                (_, "H") => {
                    self.row = parts.next().unwrap_or(1).clamp(1, 24) - 1;
                    self.column = parts.next().unwrap_or(1).max(1) - 1;
                }
                _ => {}
            }
        }
    }
}

#[test]
fn a_pause_in_a_terminal_says_how_much_it_copies() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    // One call for its tensor: longer than the command says nothing.
    let slow = JobOptions::new("train", 1).with("SUBLET_CHANGES", "off");
    let mut job =
        stage.connected_job(&slow.with("SIMCUDA_LATENCY", "cuMemcpyDtoHAsync:1500000"))?;
    let copied = |stage: &Stage| -> Outcome<u64> {
        let members = stage.members("train")?;
        Ok(members[0]["copied"]["of_bytes"].as_u64().unwrap_or_default())
    };
    assert_eq!(copied(&stage)?, 0);
    std::thread::scope(|scope| -> Outcome {
        let look = || sublet_tests::until("it copies", TIMEOUT, || Ok(copied(&stage)? > 0));
        let looking = scope.spawn(look);
        let mut pause = Terminal::start(&stage, &["pause", "train"])?;
        pause.until_shown("pausing train: ")?;
        pause.until_shown("MiB")?;
        pause.until_shown("paused tenant 'train' in ")?;
        assert_eq!(pause.left()?, Some(0));
        looking.join().expect("the thread ends")
    })?;
    assert_eq!(copied(&stage)?, 0);
    stage.resume("train")?;
    job.step(1)?;
    job.exit()
}

#[test]
fn a_process_that_is_stopped_keeps_its_row_with_why_and_what_it_holds() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let job = stage.job(&JobOptions::new("train", 2))?;
    let (stopped, other) = (job.ranks[0].pid(), job.ranks[1].pid());
    job.ranks[0].stop()?;
    let ran = stage.sublet_told("LD_LIBRARY_PATH", &stage.libraries_with_nvml(), &["ps", "-v"])?;
    let shown = ran.succeeded()?.stdout;
    let row = |pid: u32| {
        let pid = pid.to_string();
        let found = shown.lines().find(|line| line.split_whitespace().nth(1) == Some(&pid));
        found.unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert!(row(other).contains(" active"), "{shown}");
    let wanted = format!("train {stopped} no answer: stopped (SIGSTOP) 0 - - - ");
    assert!(row(stopped).starts_with(&wanted) && row(stopped).contains(" MiB - - "), "{shown}");
    job.ranks[0].signal(Signal::SIGCONT)?;
    let stats = stage.sublet(&["stats", "train"])?.succeeded()?.stdout;
    assert!(!stats.contains("no answer"), "{stats}");
    job.exit()
}

#[test]
fn the_first_look_at_a_paused_job_that_was_killed_says_that_it_has_ended() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = stage.job(&JobOptions::new("train", 2))?;
    stage.sublet(&["pause", "train"])?.succeeded()?;
    job.ranks.iter_mut().try_for_each(Rank::kill)?;
    let told = stage.sublet(&["ps"])?.succeeded()?.stderr;
    assert!(
        told.contains("tenant 'train' has no live process; what 2 dead processes left"),
        "{told}"
    );
    assert_eq!(stage.sublet(&["ps"])?.succeeded()?.stderr, "");
    Ok(())
}

#[test]
fn a_job_without_gpu_memory_is_listed_and_who_pauses_it_is_told_that_it_has_none_yet() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut command = stage.command(&stage.files().sublet);
    command.args(["run", "--tenant", "early", "--library"]).arg(&stage.files().preload);
    let mut job = command.args(["--", "sleep", "300"]).spawn()?;
    let listed = |words: &[&str]| -> Outcome<bool> {
        let shown = stage.sublet(&["ps"])?.succeeded()?.stdout;
        Ok(shown.lines().any(|line| words.iter().all(|word| line.contains(word))))
    };
    let pid = job.id().to_string();
    let row = ["early", pid.as_str(), "no memory yet", "sleep 300"];
    sublet_tests::until("it is listed", TIMEOUT, || listed(&row))?;
    let refused = stage.sublet(&["pause", "early"])?.exited(1)?.stderr;
    let told =
        format!("process {pid} (sleep 300) runs as tenant 'early' and has no GPU memory yet");
    assert!(refused.contains(&told), "{refused}");
    job.kill()?;
    job.wait()?;
    assert!(!listed(&["early"])?);
    Ok(())
}

#[test]
fn metrics_are_those_of_the_tenants_on_standard_output_and_in_a_file() -> Outcome {
    let (stage, job) = Stage::with_train(&CAPACITIES, 2)?;
    stage.pause("train")?;
    let ran = stage.sublet(&["metrics"])?.succeeded()?;
    let member = &stage.members("train")?[0];
    let uuid = member["pool"]["devices"][0]["uuid"].as_str().unwrap_or_default().to_owned();
    for wanted in [
        "sublet_processes{tenant=\"train\",state=\"paused\"} 2".to_owned(),
        format!("sublet_pauses_total{{tenant=\"train\",pid=\"{}\"}} 1", job.ranks[0].pid()),
        format!(
            "uuid=\"{uuid}\",library=\"rank\",tag=\"scratch\",contents=\"discard\",kind=\"away\"}} 4194304"
        ),
    ] {
        assert!(ran.stdout.contains(&wanted), "no {wanted} in {}", ran.stdout);
    }
    let file = stage.run_dir_path().join("sublet.prom");
    let path = file.to_string_lossy();
    stage.sublet(&["metrics", "--textfile", &path])?.succeeded()?;
    assert!(fs::read_to_string(&file)?.ends_with("# EOF\n"));
    stage.sublet(&["metrics", "--textfile", "/no/such/dir/sublet.prom"])?.exited(1)?;
    stage.sublet(&["metrics", "--every", "1s"])?.exited(2)?;

    // It goes on until it is told to end, and the file follows.
    let mut command = stage.command(&stage.files().sublet);
    let mut goes_on = command.args(["metrics", "--textfile", &path, "--every", "50ms"]).spawn()?;
    stage.resume("train")?;
    let deadline = Instant::now() + TIMEOUT;
    while !fs::read_to_string(&file)?.contains("state=\"active\"} 2") {
        assert!(Instant::now() < deadline, "the file stays as it was");
        std::thread::yield_now();
    }
    kill(Pid::from_raw(i32::try_from(goes_on.id())?), Signal::SIGTERM)?;
    assert_eq!(goes_on.wait()?.code(), Some(0));
    job.exit()
}

/// `sublet metrics --listen` on a free port, and where it is.
struct Served(Child, String);

impl Drop for Served {
    fn drop(&mut self) {
        // It has ended already, where the test went well.
        let _ended = self.0.kill();
    }
}

impl Served {
    fn start(stage: &Stage) -> Outcome<Self> {
        let mut command = stage.command(&stage.files().sublet);
        command.args(["metrics", "--listen", "127.0.0.1:0"]).stdout(Stdio::piped());
        let mut served = Self(command.spawn()?, String::new());
        let mut line = String::new();
        if let Some(output) = served.0.stdout.take() {
            BufReader::new(output).read_line(&mut line)?;
        }
        let found = line.split_once("http://").and_then(|(_, rest)| rest.split_once("/metrics"));
        let address = found.map(|(address, _)| address.to_owned());
        served.1 = address.ok_or_else(|| Trouble::new(format!("no address in {line:?}")))?;
        Ok(served)
    }

    /// The answer to one scrape, headers and all.
    fn scrape(&self) -> Outcome<String> {
        let mut stream = TcpStream::connect(&self.1)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let request = format!(
            "GET /metrics HTTP/1.1\r\nHost: {}\r\nAccept: application/openmetrics-text\r\n\r\n",
            self.1
        );
        stream.write_all(request.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// Scrapes until the answer says this: an answer may be a second old, and has no figures where a look takes longer than a
    /// scrape waits.
    fn until_found(&self, wanted: &str) -> Outcome {
        sublet_tests::until(&format!("a page with {wanted}"), TIMEOUT, || {
            let found = self.scrape()?;
            Ok(found.starts_with("HTTP/1.1 200") && found.contains(wanted))
        })
    }
}

#[test]
fn metrics_are_scraped_by_http_until_a_signal_also_of_a_process_that_stands_still() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut served = Served::start(&stage)?;
    let empty = served.scrape()?;
    assert!(empty.starts_with("HTTP/1.1 200") && empty.ends_with("# EOF\n"), "{empty}");
    assert!(empty.contains("application/openmetrics-text; version=1.0.0"), "{empty}");
    let job = stage.connected_job(&JobOptions::new("train", 2))?;
    served.until_found("sublet_processes{tenant=\"train\",state=\"active\"} 2")?;
    job.ranks[0].stop()?;
    served.until_found("sublet_silent_processes{tenant=\"train\"} 1")?;
    let shown = stage.sublet(&["ps"])?.succeeded()?;
    let stopped =
        format!("it is stopped (SIGSTOP): `kill -CONT {}` continues it", job.ranks[0].pid());
    assert!(shown.stdout.contains(&stopped), "{shown:?}");
    job.ranks[0].signal(Signal::SIGCONT)?;
    let taken = stage.sublet(&["metrics", "--listen", &served.1])?.exited(1)?;
    assert!(taken.stderr.contains("cannot be listened on"), "{taken:?}");
    kill(Pid::from_raw(i32::try_from(served.0.id())?), Signal::SIGINT)?;
    assert_eq!(served.0.wait()?.code(), Some(0));
    assert!(TcpStream::connect(&served.1).is_err(), "somebody still listens");
    job.exit()
}

/// Slices of a timeline: name and row.
fn slices(path: &std::path::Path) -> Outcome<Vec<(String, u64)>> {
    let document: Value = serde_json::from_str(&fs::read_to_string(path)?)?;
    let events = document["traceEvents"].as_array().cloned().unwrap_or_default();
    let slice = |event: &Value| Some((event["name"].as_str()?.to_owned(), event["pid"].as_u64()?));
    Ok(events.iter().filter(|event| event["ph"] == "X").filter_map(slice).collect())
}

#[test]
fn a_timeline_has_every_process_and_phase_of_the_last_pause_and_resume() -> Outcome {
    let (stage, job) = Stage::with_train(&CAPACITIES, 2)?;
    let file = stage.run_dir_path().join("t.json");
    let path = file.to_string_lossy();
    let ran = stage.sublet(&["trace", "train", "-o", &path])?.exited(1)?;
    assert!(ran.stderr.contains("has been paused or resumed yet"), "{ran:#?}");
    assert!(!file.exists());

    stage.pause("train")?;
    stage.resume("train")?;
    stage.sublet(&["trace", "train", "-o", &path])?.succeeded()?;
    let found = slices(&file)?;
    for phase in ["prepare", "release", "restore", "activate"] {
        for rank in &job.ranks {
            let wanted = (phase.to_owned(), u64::from(rank.pid()));
            assert!(found.contains(&wanted), "no {wanted:?}: {found:#?}");
        }
    }
    job.exit()
}

#[test]
fn manual_pages_and_completions_are_written() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let dir = stage.node_path();
    stage.sublet(&["man", &dir.to_string_lossy()])?.succeeded()?;
    let page = fs::read_to_string(dir.join("sublet-swap.1"))?;
    assert!(page.starts_with(".ie") && page.contains("sublet swap"), "{page}");
    for shell in ["bash", "zsh", "fish"] {
        let script = stage.sublet(&["completions", shell])?.succeeded()?.stdout;
        assert!(script.contains("COMPLETE="), "{script}");
    }
    stage.sublet(&["completions", "tcsh"])?.exited(2)?;
    Ok(())
}

#[test]
fn shells_complete_the_names_of_tenants() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let jobs = ["train", "infer"].map(|name| stage.job(&JobOptions::new(name, 1)));
    let mut command = stage.command(&stage.files().sublet);
    command.env("COMPLETE", "bash").env("_CLAP_COMPLETE_INDEX", "2");
    let shown = command.args(["--", "sublet", "pause", ""]).output()?;
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    for name in ["train", "infer"] {
        assert!(shown.lines().any(|line| line == name), "no {name} in {shown}");
    }
    jobs.into_iter().try_for_each(|job| job?.exit())
}

#[test]
fn ps_says_who_changes_a_tenant() -> Outcome {
    let (stage, job) = Stage::with_train(&CAPACITIES, 2)?;
    job.ranks[0].stop()?;
    let mut pause =
        stage.command(&stage.files().sublet).args(["pause", "train", "--timeout", "2m"]).spawn()?;
    let named = format!("train: process {} (", pause.id());
    sublet_tests::until("it is named", TIMEOUT, || {
        let shown = stage.sublet(&["ps"])?.succeeded()?.stdout;
        Ok(shown.lines().any(|line| line.starts_with(&named) && line.ends_with("holds the tenant")))
    })?;
    job.ranks[0].signal(Signal::SIGCONT)?;
    assert!(pause.wait()?.success());
    stage.resume("train")?;
    job.exit()
}

#[test]
fn ps_of_one_job_is_one_row_and_takes_its_name() -> Outcome {
    let (stage, job) = Stage::with_train(&CAPACITIES, 2)?;
    let other = stage.job(&JobOptions::new("infer", 1))?;
    let shown = stage.sublet(&["ps", "train"])?.succeeded()?.stdout;
    let row = format!(" {} +1 ", job.ranks[0].pid());
    assert!(shown.lines().count() <= 6 && shown.contains(&row), "{shown}");
    assert!(!shown.contains("infer"), "{shown}");
    job.exit()?;
    other.exit()
}

/// Entries of the run directory that Sublet did not make: others are shown all the same, and commands end.
#[test]
fn tenants_are_shown_beside_entries_that_are_none() -> Outcome {
    let (stage, job) = Stage::with_train(&CAPACITIES, 1)?;
    let place = |tenant: &str| -> Outcome<PathBuf> {
        let path = stage.run_dir_path().join(tenant);
        fs::create_dir(&path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o700))?;
        Ok(path)
    };
    let open = place("open")?;
    fs::write(open.join("1.sock"), "")?;
    fs::set_permissions(&open, Permissions::from_mode(0o755))?;
    let (fifo, directory) = (place("fifo")?, place("directory")?);
    mkfifo(&fifo.join("coordinator.lock"), Mode::S_IRWXU)?;
    fs::create_dir(directory.join("coordinator.lock"))?;
    for dir in [&fifo, &directory] {
        fs::write(dir.join("1.sock"), "")?;
    }
    fs::write(stage.run_dir_path().join("file"), "")?;
    mkfifo(&stage.run_dir_path().join("pipe"), Mode::S_IRWXU)?;
    for arguments in [["ps"].as_slice(), &["stats"], &["metrics"], &["ps", "--json"]] {
        let ran = stage.sublet(arguments)?.exited(0)?;
        assert!(ran.stdout.contains("train"), "{ran:#?}");
        assert!(ran.stderr.contains("tenant 'open': "), "{ran:#?}");
    }
    stage.pause("train")?;
    stage.resume("train")?;
    for tenant in ["fifo", "directory"] {
        let ran = stage.sublet(&["pause", tenant])?.exited(1)?;
        assert!(ran.stderr.contains("no regular file"), "{ran:#?}");
    }
    job.works_and_exits()
}
