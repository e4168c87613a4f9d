//! Members that speak the protocol over real sockets and misbehave as told.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, helpers of it too")]

mod agent;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use vmm_pool::Schedule;

use crate::script::{Deed, Script};
use tenants::coordinator::{Coordinator, Event, Options};
use tenants::identity::{MemberId, TenantName};
use tenants::run_dir::RunDir;
use tenants::wire::{MemberState, Phase};

use self::agent::Agent;

const STEP: Duration = Duration::from_millis(5);

/// One line of the log that all members of a world share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    /// It begins this.
    Began(u64, Deed),
    /// It is told when to save.
    Schedule(u64, Schedule),
    /// It has done this.
    Ended(u64, Deed),
    /// Its consent is wanted.
    Consent(u64),
    /// It hears that this is why nothing comes of it.
    GivenUp(u64, String),
    /// It is told that no contents are wanted in files any more.
    CalledOff(u64),
}

/// A run directory and the members in it.
#[derive(Debug)]
pub struct World {
    /// The place where their sockets are.
    pub run_dir: RunDir,
    /// All that they were told and did, in order.
    pub log: Arc<Mutex<Vec<Line>>>,
    members: Vec<Member>,
    has_silent: bool,
    stop: Arc<AtomicBool>,
    _base: tempfile::TempDir,
}

#[derive(Debug)]
struct Member {
    id: u64,
    state: Arc<Mutex<MemberState>>,
    thread: Option<JoinHandle<()>>,
}

/// A tenant's name.
pub fn tenant(name: &str) -> TenantName {
    TenantName::new(name).unwrap()
}

/// Deadlines that members keep on a busy machine too.
pub fn options() -> Options {
    let long = Duration::from_secs(30);
    // What is given up immediately is so long before a deadline.
    let deadline = Duration::from_mins(3);
    Options {
        timeout: Some(deadline),
        finish_timeout: deadline,
        cut_timeout: long,
        reply_margin: Duration::from_secs(5),
        contact_timeout: long,
        lock_timeout: long,
        consent: None,
        ..Options::default()
    }
}

/// Short deadlines, so that tests of silence are short. The others still have two seconds.
pub fn impatient() -> Options {
    let short = Duration::from_secs(1);
    Options {
        timeout: Some(short),
        finish_timeout: short,
        reply_margin: short,
        contact_timeout: 2 * short,
        ..options()
    }
}

/// Progress that nobody looks at.
pub fn quiet(_event: Event<'_>) {}

impl World {
    /// A world without members.
    #[expect(clippy::new_without_default, reason = "it makes a directory")]
    pub fn new() -> Self {
        let base = tempfile::tempdir().unwrap();
        Self {
            run_dir: RunDir::open(Some(base.path().join("run")), None).unwrap(),
            log: Arc::default(),
            members: Vec::new(),
            has_silent: false,
            stop: Arc::default(),
            _base: base,
        }
    }

    /// A world with one member of tenant `train` for each script; their ids count from 1.
    pub fn of(scripts: &[Script]) -> Self {
        let mut world = Self::new();
        for (id, script) in (1..).zip(scripts) {
            world.add("train", id, script.clone());
        }
        world
    }

    /// One more member, of tenant `name`.
    pub fn add(&mut self, name: &str, id: u64, script: Script) {
        let (_dir, listener) = self.run_dir.listen(&tenant(name), MemberId(id)).unwrap();
        let state = Arc::new(Mutex::new(script.state));
        self.has_silent |= script.is_ever_silent();
        let agent = Agent {
            id,
            script,
            state: Arc::clone(&state),
            log: Arc::clone(&self.log),
            stop: Arc::clone(&self.stop),
            written: AtomicU64::new(0),
            moved: AtomicU64::new(0),
            leader: AtomicU64::new(0),
            held_back: Mutex::new(None),
        };
        let thread = std::thread::spawn(move || agent.serve(listener));
        self.members.push(Member { id, state, thread: Some(thread) });
    }

    /// Patient with members that all answer.
    pub fn coordinator(&self) -> Coordinator {
        let options = if self.has_silent { impatient() } else { options() };
        Coordinator::new(self.run_dir.clone(), tenant("train"), options)
    }

    /// The state of one member.
    pub fn state(&self, id: u64) -> MemberState {
        let member = self.members.iter().find(|member| member.id == id).unwrap();
        *member.state.lock().unwrap()
    }

    /// The states of all members, in the order in which they were added.
    pub fn states(&self) -> Vec<MemberState> {
        let states = self.members.iter().map(|member| self.state(member.id));
        states.collect()
    }

    /// The phases that one member began, in order.
    pub fn phases_of(&self, id: u64) -> Vec<Phase> {
        let log = self.log.lock().unwrap();
        log.iter()
            .filter_map(|line| match line {
                Line::Began(member, deed) if *member == id => Some(deed.phase()),
                Line::Began(..)
                | Line::Schedule(..)
                | Line::Ended(..)
                | Line::Consent(_)
                | Line::GivenUp(..)
                | Line::CalledOff(_) => None,
            })
            .collect()
    }

    /// The log so far.
    pub fn lines(&self) -> Vec<Line> {
        self.log.lock().unwrap().clone()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for member in &mut self.members {
            if let Some(thread) = member.thread.take() {
                thread.join().unwrap();
            }
        }
    }
}
