//! Processes under the real preload object that are in more than one pause: one whose coordinator has ended, and one of their own.

use std::time::{Duration, Instant};

use sublet_tests::{MIB, Outcome, Rank, Stage, Trouble};
use tenants::identity::TenantName;
use tenants::scope::{Scope, TagNames};
use tenants::transport::Connection;
use tenants::wire::{MemberState, Phase, Reply, Request, TakePhase, Told};

const CAPACITIES: [u64; 2] = [256 * MIB; 2];
const SOON: Duration = Duration::from_secs(30);

fn soon() -> Instant {
    Instant::now() + SOON
}

fn call(line: &mut Connection, request: &Request) -> Outcome<Reply> {
    Ok(line.exchange(request, 0, soon())?.0)
}

/// Leads `line` through `phase` of a pause by tag `x`.
fn lead(line: &mut Connection, phase: Phase) -> Outcome {
    let tags = TagNames::Named(["x".to_owned()].into());
    let scope = Scope::Tags { tags, owner: None };
    let order = phase.order(&Told::new(&scope, &[]));
    let request = Request::Phase(TakePhase { round: 7, alone: false, order, timeout_ms: 60_000 });
    let reply = call(line, &request)?;
    if matches!(reply, Reply::PhaseDone(done, _) if done == phase) {
        return Ok(());
    }
    Err(Trouble::new(format!("{phase:?}: {reply:?}")))
}

/// A connection to each of `ranks`, in their order.
fn lines(stage: &Stage, ranks: &[&Rank]) -> Outcome<Vec<Connection>> {
    let dir = stage.run_dir().existing_tenant(&TenantName::new("train")?)?;
    let sockets = dir.ok_or_else(|| Trouble::new("no tenant"))?.members()?;
    let mut found = Vec::new();
    for socket in sockets {
        found.push(Connection::connect(&socket.path, soon())?);
    }
    let place = |line: &Connection| {
        let pid = line.peer().pid();
        ranks.iter().position(|rank| Some(rank.pid()) == pid)
    };
    found.sort_by_key(place);
    Ok(found)
}

/// Waits until the process behind `line` is on no way any more, and says how much imported memory of tag `x` is away there.
fn settled(line: &mut Connection) -> Outcome<u64> {
    let deadline = soon();
    loop {
        let Reply::Member(info) = call(line, &Request::Hello)? else {
            return Err(Trouble::new("no greeting"));
        };
        if info.state == MemberState::Active {
            let of_x = info.tags.iter().filter(|row| row.tag == "x");
            return Ok(of_x.map(|row| row.imported_away_bytes).sum());
        }
        if Instant::now() >= deadline {
            return Err(Trouble::new(format!("it stays {:?}", info.state)));
        }
        std::thread::yield_now();
    }
}

#[test]
fn one_that_acts_by_itself_after_its_coordinators_end_and_its_peer_see_one_memory() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut owner = stage.relative("train", &[], &[])?;
    let mut importer = stage.relative("train", &[], &[])?;
    owner.do_it("tagged x 5")?;
    owner.do_it("spare y")?;
    let handle = owner.do_it("handle")?.text;
    importer.do_it(&format!("open {handle}"))?;
    importer.do_it("look 5")?;
    let mut lines_to = lines(&stage, &[&owner, &importer])?;
    let mut others = lines(&stage, &[&owner, &importer])?;
    for phase in [Phase::CloseGate, Phase::Drain, Phase::Prepare] {
        for line in &mut lines_to {
            lead(line, phase)?;
        }
    }
    // It ends when it has told the owner, and the importer hears of that late.
    lead(&mut lines_to[0], Phase::Release)?;
    let late = lines_to.pop();
    drop(lines_to);
    owner.do_it("away y")?;
    owner.do_it("back y")?;
    drop(late);
    let away_bytes = settled(&mut others[1])?;
    assert!(away_bytes > 0, "the importer has kept what the owner has released");
    stage.patiently(&["resume", "train", "--tag", "x"])?;
    owner.do_it("fill 7")?;
    importer.do_it("look 7")?;
    owner.exit()?;
    importer.exit()?;
    Ok(())
}
