//! Processes whose limit of open files is just what their applications need. One test, since the limit is the whole
//! process's.

use std::sync::Arc;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use sublet_stage::redeem;
use tenants::coordinator::{Coordinator, Options, Outcome};
use tenants::identity::TenantName;
use tenants::member::{Member, MemberConfig};
use tenants::run_dir::RunDir;
use tenants::wire::MemberState;
use vmm_pool::driver::sim::{GRANULARITY_BYTES, SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{AllocationProp, DeviceAddress, DeviceOrdinal, Driver as _, VaRange};
use vmm_pool::{Class, Contents};

const SHARED: u64 = 200;
/// Room for connections and the like.
const SPARE: u64 = 60;

#[test]
fn what_was_paused_can_be_resumed_within_a_limit_that_the_application_lived_with() {
    let open_files = || std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    let soft_limit = || getrlimit(Resource::RLIMIT_NOFILE).unwrap().0;
    let before = soft_limit();
    let base = tempfile::tempdir().unwrap();
    let run_dir = RunDir::open(Some(base.path().join("run")), None).unwrap();
    let tenant = TenantName::new("train").unwrap();
    let node = SimNode::private(&[(SHARED + 1) * GRANULARITY_BYTES]).unwrap();
    let join = || {
        let config = MemberConfig::new(run_dir.clone(), tenant.clone(), "a member", "0.1.0");
        let options = SimOptions { raises_descriptor_limit: false, ..SimOptions::default() };
        Member::join(config, Arc::new(SimDriver::new(node.clone(), options))).unwrap()
    };
    let (owner, importer) = (join(), join());
    assert_eq!(soft_limit(), before, "the simulated driver has changed it");
    let prop = AllocationProp::pinned_on(DeviceOrdinal(0));
    let class = || Class { library: "test", tag: String::new(), contents: Contents::Discard };
    for _ in 0..SHARED {
        let shared = owner.pool().enter().create(GRANULARITY_BYTES, &prop, class()).unwrap();
        let fd = owner.sharing().issue_ticket(&owner.pool().enter(), shared).unwrap();
        let imported = redeem(&importer, &fd).unwrap();
        for (member, handle) in [(&owner, shared), (&importer, imported)] {
            let driver = member.pool().driver();
            let at = driver.address_reserve(GRANULARITY_BYTES, 0, DeviceAddress(0)).unwrap();
            member.pool().enter().map(VaRange::new(at, GRANULARITY_BYTES), 0, handle).unwrap();
        }
    }
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let low = open_files() + SPARE;
    setrlimit(Resource::RLIMIT_NOFILE, low, hard).unwrap();
    let mut coordinator = Coordinator::new(run_dir, tenant, Options::default());
    for _ in 0..2 {
        assert!(matches!(coordinator.pause(&mut |_| {}).unwrap(), Outcome::Completed(_)));
        assert_eq!(soft_limit(), low);
        assert!(matches!(coordinator.resume(&mut |_| {}).unwrap(), Outcome::Completed(_)));
        assert_eq!(
            [owner.lifecycle().state(), importer.lifecycle().state()],
            [MemberState::Active; 2]
        );
    }
    // The answer is out before descriptors are closed and the limit is put back; the next pause comes after that.
    assert!(matches!(coordinator.pause(&mut |_| {}).unwrap(), Outcome::Completed(_)));
    assert_eq!(soft_limit(), low);
    owner.leave();
    importer.leave();
}
