//! Real members over the simulated driver in one process: the ranks of a job, and a coordinator's connection to one of them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, helpers of it too")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use tenants::coordinator::{Coordinator, Options};
use tenants::cut::{CommunicatorId, Increment, Lane, Rank, Series};
use tenants::keep;
use tenants::member::{Member, MemberConfig};
use tenants::run_dir::RunDir;
use tenants::scope::Scope;
use tenants::stepping::{Activity, Calls, StepOrder};
use tenants::transport::Connection;
use tenants::wire::{MemberState, Phase, Reply, Request, StepOn, TakePhase};
use vmm_pool::driver::sim::{SimDriver, SimNode, SimOptions};

use crate::fake::tenant;
use crate::script::Deed;

/// A member over the simulated driver.
pub type SimMember = Member<SimDriver>;

/// The communicator of all ranks.
pub const WORLD: CommunicatorId = CommunicatorId(0xab12_cd34 << 96);
/// Everything has happened by then.
pub const SOON: Duration = Duration::from_secs(30);

/// The number of the round that a [`Line`] leads first.
pub const ROUND: u64 = 12;

/// Several processes' worth of members, in this one.
#[derive(Debug)]
pub struct Job {
    /// The place where their sockets are.
    pub run_dir: RunDir,
    /// One a rank, in order.
    pub members: Vec<Arc<SimMember>>,
    _base: tempfile::TempDir,
}

/// The lane that ranks launch on.
pub fn collectives() -> Lane {
    Lane { communicator: WORLD, series: Series::Collectives }
}

/// The usual deadlines.
pub fn patient() -> Options {
    Options { timeout: None, ..Options::default() }
}

impl Job {
    /// So many members, one rank of one communicator in each.
    pub fn new(ranks: u32) -> Self {
        Self::with(ranks, |_, _| {})
    }

    /// As [`Job::new`], with the configuration of each rank changed first.
    pub fn with(ranks: u32, change: impl Fn(u32, &mut MemberConfig)) -> Self {
        Self::joined(ranks, change, |config, driver| Member::join(config, driver).unwrap())
    }

    /// As [`Job::with`], of processes that do with saved contents and host memory what `settings` say.
    pub fn keeping(
        ranks: u32,
        settings: keep::Settings,
        change: impl Fn(u32, &mut MemberConfig),
    ) -> Self {
        let join = |config, driver| keep::join(config, settings, driver).unwrap();
        Self::joined(ranks, change, join)
    }

    fn joined(
        ranks: u32,
        change: impl Fn(u32, &mut MemberConfig),
        join: impl Fn(MemberConfig, Arc<SimDriver>) -> Arc<SimMember>,
    ) -> Self {
        let base = tempfile::tempdir().unwrap();
        let run_dir = RunDir::open(Some(base.path().join("run")), None).unwrap();
        let members = (0..ranks).map(|rank| {
            let node = SimNode::private(&[64 * 1024 * 1024]).unwrap();
            let mut config =
                MemberConfig::new(run_dir.clone(), tenant("train"), "python train.py", "0.1.0");
            change(rank, &mut config);
            let driver = SimDriver::new(node, SimOptions::default());
            let member = join(config, Arc::new(driver));
            member.cut().add_rank(Rank { communicator: WORLD, rank, ranks });
            member
        });
        Self { members: members.collect(), run_dir, _base: base }
    }

    /// Their coordinator.
    pub fn coordinator(&self, options: Options) -> Coordinator {
        Coordinator::new(self.run_dir.clone(), tenant("train"), options)
    }

    /// The states of all ranks, in order.
    pub fn states(&self) -> Vec<MemberState> {
        self.members.iter().map(|member| member.lifecycle().state()).collect()
    }

    /// One collective of `rank`.
    pub fn launch(&self, rank: usize) {
        launch(&self.members[rank], rank);
    }

    /// The number of collectives that each rank has launched.
    pub fn launched(&self) -> Vec<u64> {
        let ranks = self.members.iter().zip(0..);
        ranks.map(|(member, rank)| member.cut().counter(collectives(), rank).launched()).collect()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for member in &self.members {
            member.cut().release();
            member.leave();
        }
    }
}

/// One collective of `rank`.
pub fn launch(member: &SimMember, rank: usize) {
    let counter = member.cut().counter(collectives(), u32::try_from(rank).unwrap());
    drop(member.cut().enter("ncclAllReduce", &[Increment { counter, launches: 1 }]));
}

/// Waits until it `holds`.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !holds() {
        assert!(Instant::now() < deadline, "{what} did not come");
        std::thread::yield_now();
    }
}

/// A coordinator's connection to one member, and the round that it leads over it.
#[derive(Debug)]
pub struct Line(pub Connection, pub u64);

impl Line {
    /// To `member`.
    pub fn to(member: &SimMember) -> Self {
        Self(
            Connection::connect(member.presence().socket_path(), Instant::now() + SOON).unwrap(),
            ROUND,
        )
    }

    /// Its answer to `request`.
    pub fn ask(&mut self, request: &Request) -> Reply {
        self.0.send(request, &[], Instant::now() + SOON).unwrap();
        self.0.receive(Instant::now() + SOON).unwrap().0
    }

    /// Its answer to an order.
    pub fn phase_of(&mut self, deed: impl Into<Deed>, scope: &Scope) -> Reply {
        let deed = deed.into();
        let request = self.order(deed, scope);
        // What follows the last step of a round is another.
        self.1 += u64::from(deed.phase().is_last());
        self.ask(&request)
    }

    /// The order for a deed.
    pub fn order(&self, deed: impl Into<Deed>, scope: &Scope) -> Request {
        let order = deed.into().order(scope);
        Request::Phase(TakePhase { round: self.1, alone: false, order, timeout_ms: 30_000 })
    }

    /// A step that succeeds.
    pub fn lead(&mut self, deed: impl Into<Deed>, scope: &Scope) {
        let deed = deed.into();
        let reply = self.phase_of(deed, scope);
        assert!(matches!(reply, Reply::PhaseDone(..)), "{deed:?}: {reply:?}");
    }

    /// Behind its shut gate.
    pub fn step(&mut self, order: u64, calls: Calls) -> Activity {
        let step = StepOrder { order, limits: None, calls };
        let request = StepOn { round: ROUND, step, wait_ms: 30_000, ..StepOn::default() };
        let reply = self.ask(&Request::Step(request));
        let Reply::Activity(activity) = reply else { panic!("{reply:?}") };
        *activity
    }

    /// A step that fails.
    pub fn fail(&mut self, phase: Phase, scope: &Scope) {
        let reply = self.phase_of(phase, scope);
        assert!(matches!(reply, Reply::Failed(_)), "{phase:?}: {reply:?}");
    }
}
