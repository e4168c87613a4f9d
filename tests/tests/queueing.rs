//! Tenants that queue for the GPUs by themselves: by a resume, by an allocation that does not fit, and by a call while they were paused for another.

use std::os::unix::fs::DirBuilderExt as _;
use std::time::{Duration, Instant};

use serde_json::Value;
use sublet_tests::{MIB, Outcome, Rank, Stage, Trouble};

const WAIT: Duration = Duration::from_mins(2);
const AUTO: &[&str] = &["--turns", "auto"];
/// Its quantum is longer than any test.
const AUTO_LONG: &[&str] = &["--turns", "auto", "--weight", "100"];

/// A tenant that waits, and what for.
type Waits = (String, String);

/// Tenants in their turn, and those that wait.
fn claims(stage: &Stage) -> Outcome<(Vec<String>, Vec<Waits>)> {
    let shown = stage.sublet(&["turns", "--json"])?.succeeded()?.json()?;
    let word = |claim: &Value, name: &str| claim[name].as_str().unwrap_or_default().to_owned();
    let all = shown["claims"].as_array().cloned().unwrap_or_default();
    let (in_turn, waiting): (Vec<_>, Vec<_>) =
        all.iter().partition(|claim| claim["is_in_turn"] == true);
    let waiting = waiting.into_iter().map(|claim| (word(claim, "tenant"), word(claim, "wish")));
    Ok((in_turn.into_iter().map(|claim| word(claim, "tenant")).collect(), waiting.collect()))
}

fn until(what: &str, is_so: impl FnMut() -> Outcome<bool>) -> Outcome {
    sublet_tests::until(what, WAIT, is_so)
}

/// A tenant that has come back runs a moment before its place in the queue is given up.
fn nobody_claims(stage: &Stage) -> Outcome {
    until("nobody is in its turn or waits", || Ok(claims(stage)? == (Vec::new(), Vec::new())))
}

fn until_waits(stage: &Stage, tenant: &str, wish: &str) -> Outcome {
    let wanted = (tenant.to_owned(), wish.to_owned());
    until(&format!("{tenant} waits for {wish}"), || Ok(claims(stage)?.1.contains(&wanted)))
}

/// Has got what it waited for.
fn goes_on(rank: &mut Rank) -> Outcome {
    let answer = rank.answer_within(WAIT)?;
    if answer.is_ok { Ok(()) } else { Err(Trouble::new(format!("refused: {}", answer.text))) }
}

/// Where it must succeed, processes of a busy machine may be late with an answer.
fn resume(stage: &Stage, tenant: &str, words: &[&str], code: i32) -> Outcome<Value> {
    let wait: &[&str] = if code == 0 && words == ["--queue"] { &["--wait=2m"] } else { &[] };
    stage.sublet(&[&["resume", tenant, "--json"], words, wait].concat())?.exited(code)?.json()
}

/// `train`, which holds 14 of 24 MiB, and `infer`, which holds none.
fn pair(train: &[&str], infer: &[&str]) -> Outcome<(Stage, Rank, Rank)> {
    pair_with(train, infer, &[])
}

/// As [`pair`], with variables of the environment of `train`.
fn pair_with(
    train: &[&str],
    infer: &[&str],
    settings: &[(&str, &str)],
) -> Outcome<(Stage, Rank, Rank)> {
    let stage = Stage::new(&[24 * MIB])?;
    let mut first = stage.turn_taker_with("train", train, settings, 0)?;
    first.do_it("allocate 14 100")?;
    let second = stage.turn_taker("infer", infer, 0)?;
    Ok((stage, first, second))
}

/// As [`pair`], and `infer` holds as much, for which `train` was paused by name.
fn full_pair(train: &[&str], infer: &[&str]) -> Outcome<(Stage, Rank, Rank)> {
    full_pair_with(train, infer, &[])
}

fn full_pair_with(
    train: &[&str],
    infer: &[&str],
    settings: &[(&str, &str)],
) -> Outcome<(Stage, Rank, Rank)> {
    let (stage, first, mut second) = pair_with(train, infer, settings)?;
    stage.pause("train")?;
    second.do_it("allocate 14 200")?;
    Ok((stage, first, second))
}

#[test]
fn a_resume_that_queues_waits_its_turn_and_pauses_what_is_in_the_way() -> Outcome {
    let (stage, mut train, mut infer) = full_pair(&[], &["--weight", "100"])?;
    infer.do_it("begin 120000")?;
    let said = resume(&stage, "train", &["--queue"], 1)?;
    assert!(said["error"].as_str().unwrap_or_default().contains("'infer' (fair) is in its turn"));
    assert_eq!((&said["retryable"], &said["unchanged"]), (&true.into(), &true.into()));
    std::thread::scope(|scope| -> Outcome {
        let waits = scope.spawn(|| resume(&stage, "train", &["--queue", "--wait=120s"], 0));
        until_waits(&stage, "train", "resume")?;
        infer.do_it("end")?;
        let said = waits.join().expect("the thread ends")?;
        assert_eq!((&said["outcome"], &said["paused"][0]), (&"completed".into(), &"infer".into()));
        assert_eq!(said["report"]["tenant"], "train", "{said:#}");
        Ok(())
    })?;
    train.do_it("own 100")?;
    assert_eq!(stage.states("infer")?, ["paused"]);
    nobody_claims(&stage)?;
    assert_eq!(resume(&stage, "train", &["--queue"], 0)?["outcome"], "already_active");
    Ok(())
}

#[test]
fn a_resume_that_queues_is_of_the_whole_tenant_and_how_to_queue_is_checked() -> Outcome {
    let stage = Stage::new(&[24 * MIB])?;
    stage.sublet(&["resume", "train", "--queue", "--tag", "kv"])?.exited(2)?;
    stage.sublet(&["run", "--tenant", "a", "--turns", "often", "--", "true"])?.exited(2)?;
    let said = resume(&stage, "nobody", &["--queue"], 1)?;
    assert!(said["error"].as_str().unwrap_or_default().contains("no tenant 'nobody'"), "{said}");
    let wrong = [("often", "'often' is none of auto"), ("auto,wait=x", "'x' is no time")];
    for (value, why) in wrong {
        let job = ["run", "--tenant", "a", "--", "true"];
        let ran = stage.sublet_told("SUBLET_TURNS", value, &job)?.exited(2)?;
        assert!(ran.stderr.contains(&format!("SUBLET_TURNS={value}: {why}")), "{ran:?}");
    }
    // The setting goes wrong where the command cannot see it: the process runs, and a note says so.
    for (value, _) in wrong {
        let rank = stage.turn_taker_with("train", &[], &[("SUBLET_TURNS", value)], 0)?;
        let members = stage.members("train")?;
        assert_eq!(members[0]["member"]["queues"], false);
        let notes = members[0]["notes"].to_string();
        assert!(notes.contains("the process runs as if this were not set"), "{notes}");
        drop(rank);
    }
    Ok(())
}

#[test]
fn an_allocation_that_does_not_fit_has_others_make_way_and_they_come_back_when_they_want() -> Outcome
{
    let (stage, mut train, mut infer) = pair(AUTO, AUTO)?;
    infer.do_it("allocate 14 200")?;
    assert_eq!(stage.states("train")?, ["paused"]);
    nobody_claims(&stage)?;
    let lines = stage.decisions()?;
    assert!(lines[1].starts_with("'infer' gets more memory: it lacked"), "{lines:?}");
    train.do_it("own 100")?;
    assert_eq!(stage.states("infer")?, ["paused"]);
    infer.do_it("own 200")?;
    assert_eq!(stage.states("train")?, ["paused"]);
    nobody_claims(&stage)?;
    Ok(())
}

#[test]
fn two_that_want_each_others_memory_both_get_it_one_after_the_other() -> Outcome {
    let stage = Stage::new(&[28 * MIB])?;
    let mut ranks = Vec::new();
    for (tenant, seed) in [("a", 100), ("b", 200)] {
        let mut rank = stage.turn_taker(tenant, AUTO, 0)?;
        rank.do_it(&format!("allocate 10 {seed}"))?;
        ranks.push((rank, seed));
    }
    for (rank, seed) in &mut ranks {
        rank.say(&format!("more 10 {}", *seed + 1))?;
    }
    for (rank, _) in &mut ranks {
        goes_on(rank)?;
    }
    for _ in 0..2 {
        for (rank, seed) in &mut ranks {
            rank.do_it(&format!("own {seed}"))?;
            rank.do_it(&format!("owns {}", *seed + 1))?;
        }
    }
    nobody_claims(&stage)?;
    Ok(())
}

#[test]
fn one_that_was_paused_for_another_comes_back_though_the_run_directory_has_gone_since() -> Outcome {
    let (stage, mut train, mut infer) = pair(AUTO, AUTO_LONG)?;
    infer.do_it("allocate 14 200")?;
    infer.do_it("begin 120000")?;
    train.say("own 100")?;
    until_waits(&stage, "train", "back")?;
    until("the run directory has gone", || {
        Ok(std::fs::remove_dir_all(stage.run_dir_path()).is_ok())
    })?;
    infer.do_it("end")?;
    goes_on(&mut train)?;
    infer.do_it("own 200")?;
    nobody_claims(&stage)
}

#[test]
fn one_that_waits_for_memory_can_be_paused_and_resumed_and_gets_it_in_the_end() -> Outcome {
    let (stage, mut train, mut infer) = pair(AUTO_LONG, AUTO)?;
    infer.do_it("allocate 2 200")?;
    train.do_it("begin 120000")?;
    infer.say("more 14 300")?;
    until_waits(&stage, "infer", "memory")?;
    infer.complained("waiting for GPU memory that others hold, for ")?;
    stage.pause("infer")?;
    assert_eq!(stage.states("infer")?, ["paused"]);
    stage.resume("infer")?;
    assert!(infer.answer_if_within(Duration::from_millis(300))?.is_none());
    // By name it stays so, whatever becomes free.
    stage.pause("infer")?;
    train.do_it("end")?;
    assert!(infer.answer_if_within(Duration::from_millis(700))?.is_none());
    assert_eq!(stage.states("infer")?, ["paused"]);
    assert_eq!(stage.states("train")?, ["active"]);
    stage.resume("infer")?;
    goes_on(&mut infer)?;
    infer.do_it("own 200")?;
    infer.do_it("owns 300")?;
    train.do_it("own 100").map(drop)
}

#[test]
fn at_its_deadline_an_allocation_is_refused_and_a_note_names_who_was_in_the_way() -> Outcome {
    let (stage, mut train, _infer) = pair(AUTO_LONG, AUTO)?;
    train.do_it("begin 120000")?;
    let mut third = impatient(&stage)?;
    let answer = third.ask("allocate 14 300")?;
    assert!(!answer.is_ok && answer.text.contains("OUT_OF_MEMORY"), "{answer:?}");
    let notes = stage.members("third")?[0]["notes"].to_string();
    assert!(notes.contains("was refused after it had waited"), "{notes}");
    assert!(notes.contains("'train' (fair) is in its turn"), "{notes}");
    assert_eq!(claims(&stage)?, (vec!["train".to_owned()], Vec::new()));
    third.do_it("allocate 4 300").map(drop)
}

#[test]
fn nobody_waits_for_what_is_nowhere_or_is_nobodys_to_give() -> Outcome {
    let (stage, mut train, mut infer) = pair(&[], AUTO)?;
    // More than the device has; in the hands of one that would not come back; during a capture; beyond a budget; by one that does not queue.
    assert!(!infer.ask("allocate 40 200")?.is_ok);
    assert!(!infer.ask("allocate 14 200")?.is_ok);
    let notes = stage.members("infer")?[0]["notes"].to_string();
    assert!(notes.contains("'train' holds 14 MiB and does not come back by itself"), "{notes}");
    infer.do_it("capture 2")?;
    assert!(!infer.ask("allocate 13 200")?.is_ok);
    infer.do_it("captured")?;
    assert!(!stage.members("infer")?[0]["notes"].to_string().contains("13631488"));
    let mut kept = stage.turn_taker("kept", &[AUTO, &["--budget", "6MiB"]].concat(), 0)?;
    assert!(!kept.ask("allocate 14 300")?.is_ok);
    assert!(!train.ask("more 14 300")?.is_ok);
    assert_eq!(stage.states("train")?, ["active"]);
    assert!(stage.decisions()?.iter().all(|line| !line.contains("is paused")));
    nobody_claims(&stage)?;
    Ok(())
}

#[test]
fn who_is_killed_while_it_waits_for_memory_or_is_waited_for_leaves_nothing_behind() -> Outcome {
    let (stage, mut train, mut infer) = pair(AUTO_LONG, AUTO)?;
    train.do_it("begin 120000")?;
    infer.say("allocate 14 200")?;
    until_waits(&stage, "infer", "memory")?;
    let mut third = stage.turn_taker("third", AUTO, 0)?;
    third.say("allocate 14 300")?;
    until_waits(&stage, "third", "memory")?;
    infer.kill()?;
    until("only the third waits", || Ok(claims(&stage)?.1.len() == 1))?;
    train.do_it("own 100")?;
    train.kill()?;
    let answer = third.answer_within(WAIT)?;
    assert!(answer.is_ok, "{answer:?}: {:?}", stage.members("third")?[0]["notes"]);
    third.do_it("own 300")?;
    nobody_claims(&stage)?;
    Ok(())
}

#[test]
fn who_is_idle_makes_way_before_its_quantum_is_over_and_who_works_does_not() -> Outcome {
    // Who launches nothing for as long as a switch of it takes is idle: here longer than a busy machine keeps a thread from its work.
    let slow = [("SIMCUDA_LATENCY", "cuMemcpyHtoDAsync:3000000")];
    let (stage, mut train, mut infer) = full_pair_with(AUTO_LONG, AUTO_LONG, &slow)?;
    // From here on the history knows since when each has its GPUs.
    resume(&stage, "train", &["--queue"], 0)?;
    train.say("work 100")?;
    infer.say("own 200")?;
    until_waits(&stage, "infer", "back")?;
    assert!(infer.answer_if_within(Duration::from_secs(5))?.is_none());
    train.say("stop")?;
    assert!(train.answer()?.is_ok);
    goes_on(&mut infer)?;
    // It is written down when it is done, and `infer` may be there before that.
    until("the log says why 'train' was paused", || {
        let lines = stage.decisions()?;
        let why = "'train' (fair) is paused: has launched nothing for";
        Ok(lines.iter().any(|line| line.contains(why)))
    })
}

#[test]
fn who_launches_nothing_and_has_work_on_its_device_is_not_idle() -> Outcome {
    let (stage, mut train, mut infer) = full_pair(AUTO_LONG, AUTO_LONG)?;
    resume(&stage, "train", &["--queue"], 0)?;
    train.do_it("spin")?;
    infer.say("own 200")?;
    until_waits(&stage, "infer", "back")?;
    assert!(infer.answer_if_within(Duration::from_secs(3))?.is_none());
    train.do_it("release")?;
    goes_on(&mut infer)?;
    let idle = |lines: &[String]| {
        lines.iter().filter(|line| line.contains("has launched nothing for")).count()
    };
    until("the log says why 'train' was paused", || Ok(idle(&stage.decisions()?) > 0))?;
    let lines = stage.decisions()?;
    assert_eq!(idle(&lines), 1, "{lines:?}");
    Ok(())
}

#[test]
fn it_is_said_since_when_somebody_is_idle() -> Outcome {
    let stage = Stage::new(&[24 * MIB])?;
    let mut train = stage.turn_taker("train", AUTO, 0)?;
    train.do_it("allocate 4 100")?;
    let quiet_us = |stage: &Stage| -> Outcome<u64> {
        Ok(stage.members("train")?[0]["idleness"]["quiet_us"].as_u64().unwrap_or_default())
    };
    until("it was quiet for a while", || Ok(quiet_us(&stage)? >= 1_000_000))?;
    let shown = stage.sublet(&["ps"])?.succeeded()?.stdout;
    assert!(shown.contains("active, quiet "), "{shown}");
    // Somebody waits, so its device is looked at.
    let mut infer = stage.turn_taker("infer", &[], 0)?;
    infer.do_it("allocate 4 200")?;
    // One look may end before the thread that waits for the device has had its turn.
    until("its device was seen to be idle", || {
        stage.pause("infer")?;
        resume(&stage, "infer", &["--queue"], 0)?;
        Ok(stage.sublet(&["ps"])?.succeeded()?.stdout.contains("active, idle "))
    })?;
    train.do_it("own 100")?;
    assert_eq!(stage.members("train")?[0]["idleness"]["is_drained"], false);
    Ok(())
}

/// `a`, `b` and `c` need the whole device for each of their rounds, allocate and free, and all begin together.
#[test]
fn three_that_each_fill_the_device_share_it_and_every_byte_is_right() -> Outcome {
    let stage = Stage::new(&[24 * MIB])?;
    let start = |tenant: &str| stage.turn_taker(tenant, AUTO, 0);
    let mut ranks = ["a", "b", "c"].map(start).into_iter().collect::<Outcome<Vec<_>>>()?;
    let seeds = [100, 200, 300];
    for (rank, seed) in ranks.iter_mut().zip(seeds) {
        rank.say(&format!("allocate 14 {seed}"))?;
    }
    for rank in &mut ranks {
        goes_on(rank)?;
    }
    for (rank, seed) in ranks.iter_mut().zip(seeds) {
        rank.say(&format!("work {seed}"))?;
    }
    // Each has had the device again, and comes back for the end.
    let came = |stage: &Stage| -> Outcome<usize> {
        Ok(stage.decisions()?.iter().filter(|line| line.contains("is resumed: it lacked")).count())
    };
    until("they come and go", || Ok(came(&stage)? >= 4))?;
    for rank in &mut ranks {
        rank.say("stop")?;
    }
    for rank in &mut ranks {
        let [seed] = rank.answer_within(WAIT)?.numbers::<1>()?;
        rank.do_it(&format!("own {seed}"))?;
    }
    nobody_claims(&stage)?;
    Ok(())
}

#[test]
fn who_was_paused_for_one_that_died_in_the_middle_of_it_comes_back() -> Outcome {
    let stage = Stage::new(&[48 * MIB])?;
    let mut first = stage.turn_taker("a-first", AUTO, 0)?;
    first.do_it("allocate 16 1")?;
    let mut captures = stage.turn_taker("captures", AUTO, 0)?;
    captures.do_it("allocate 16 2")?;
    let mut wide = stage.turn_taker("wide", AUTO, 0)?;
    captures.do_it("capture 2")?;
    wide.say("allocate 40 3")?;
    // The second of the two cannot be paused now, and is waited for.
    until("the first is paused", || Ok(stage.states("a-first")? == ["paused"]))?;
    wide.kill()?;
    first.do_it("own 1")?;
    captures.do_it("captured")?;
    captures.do_it("own 2")?;
    nobody_claims(&stage)?;
    Ok(())
}

/// `wide`, which is paused, needs the place of one of two; the one that is cheaper to pause captures.
#[test]
fn one_that_cannot_be_paused_is_passed_over_for_another_and_that_is_written_down() -> Outcome {
    let stage = Stage::new(&[44 * MIB])?;
    let mut wide = stage.turn_taker("wide", &[], 0)?;
    wide.do_it("allocate 16 1")?;
    stage.pause("wide")?;
    let mut captures = stage.turn_taker("captures", &["--class", "background"], 0)?;
    captures.do_it("allocate 16 2")?;
    let mut other = stage.turn_taker("other", &[], 0)?;
    other.do_it("allocate 16 3")?;
    captures.do_it("capture")?;
    // For so long the capture is waited for. Everything else takes less on a machine however busy.
    let words = ["--queue", "--wait=120s", "--timeout", "10s"];
    let said = resume(&stage, "wide", &words, 0)?;
    assert_eq!(said["paused"], serde_json::json!(["other"]), "{said:#}");
    let lines = stage.decisions()?;
    let passed_over = lines.iter().filter(|line| {
        line.starts_with("'captures' could not be paused, 1 time in a row: it is passed over for")
            && line.contains("is capturing 1 stream")
    });
    assert_eq!(passed_over.count(), 1, "{lines:?}");
    wide.do_it("own 1")?;
    captures.do_it("captured")?;
    captures.do_it("own 2")?;
    assert_eq!(stage.states("captures")?, ["active"]);
    nobody_claims(&stage)
}

/// A busy machine needs several deadlines of an impatient one for one pause.
const BUSY: Duration = Duration::from_mins(1);

fn impatient(stage: &Stage) -> Outcome<Rank> {
    let settings = [("SUBLET_TURNS", "auto,wait=3s")];
    stage.turn_taker_with("third", &[], &settings, 0)
}

/// Refused well before what it waits for would end by itself.
fn is_refused_in_time(stage: &Stage, rank: &mut Rank, why: &str) -> Outcome {
    let began = Instant::now();
    let answer = rank.ask("allocate 14 300")?;
    assert!(!answer.is_ok && answer.text.contains("OUT_OF_MEMORY"), "{answer:?}");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    let notes = stage.members("third")?[0]["notes"].to_string();
    assert!(notes.contains(why), "{notes}");
    Ok(())
}

#[test]
fn an_allocation_is_refused_at_its_deadline_though_another_process_switches_for_long() -> Outcome {
    let (stage, _train, _infer) = pair(AUTO, AUTO)?;
    let mut third = impatient(&stage)?;
    let run = stage.run_dir_path();
    std::fs::DirBuilder::new().mode(0o700).recursive(true).create(&run)?;
    let lock = run.join(".turns.lock");
    let held = std::fs::File::options().create(true).truncate(false).write(true).open(lock)?;
    held.lock()?;
    is_refused_in_time(&stage, &mut third, "tenants are being switched by")?;
    drop(held);
    sublet_tests::until("nothing is in the way any more", BUSY, || {
        Ok(third.ask("allocate 14 300")?.is_ok)
    })
}

#[test]
fn an_allocation_is_refused_at_its_deadline_though_a_pause_for_it_is_still_under_way() -> Outcome {
    let (stage, mut train, _infer) = pair(AUTO, AUTO)?;
    let mut third = impatient(&stage)?;
    train.do_it("capture 2")?;
    is_refused_in_time(&stage, &mut third, "pausing tenant 'train' was called off")?;
    train.do_it("captured")?;
    train.do_it("own 100")?;
    assert_eq!(stage.states("train")?, ["active"]);
    nobody_claims(&stage)
}
