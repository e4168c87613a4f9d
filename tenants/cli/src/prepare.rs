//! `sublet prepare`: host memory for the next pause, allocated while the tenant runs.

use std::process::ExitCode;
use std::time::Instant;

use comfy_table::Table;
use tenants::coordinator::{Coordinator, Options};
use tenants::identity::TenantName;
use tenants::keep::{self, PrepareReport, PreparedProcess};
use tenants::run_dir::RunDir;
use tenants::wire::{HostProgress, HostStage};

use crate::args::PrepareArgs;
use crate::failure::{EXIT_PARTIAL, Failure};
use crate::output::{self, Output};
use crate::progress::{Progress, bytes_line};
use crate::signals;
use crate::units;

pub(crate) fn prepare(
    args: &PrepareArgs,
    run_dir: &RunDir,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let options = Options { interrupt: Some(signals::watch()?), ..Options::default() };
    let coordinator = Coordinator::new(run_dir.clone(), args.tenant.clone(), options);
    let until = args.no_wait.then(Instant::now);
    let result = {
        let progress = Progress::start(args.show, run_dir);
        let mut say = |processes: &[_]| progress.say(line_of(&args.tenant, processes));
        keep::prepare(&coordinator, until, &mut say)
    };
    let report = result?;
    if args.show.json {
        output.json(&report)?;
    } else {
        render(&report, args.show.verbose, output);
    }
    let is_as_asked = |process: &PreparedProcess| match process.host.stage {
        HostStage::Rests => true,
        HostStage::Grows | HostStage::Waits => args.no_wait,
        HostStage::Stopped(_) => false,
    };
    let is_done = report.failures.is_empty() && report.processes.iter().all(is_as_asked);
    Ok(if is_done { ExitCode::SUCCESS } else { ExitCode::from(EXIT_PARTIAL) })
}

/// Returns a line with the progress of all processes together, and of each.
fn line_of(tenant: &TenantName, processes: &[PreparedProcess]) -> String {
    let of = |PreparedProcess { who, host, .. }: &_| (*who, host.held_bytes, host.wanted_bytes);
    bytes_line(tenant, "of host memory ready", processes.iter().map(of))
}

fn render(report: &PrepareReport, verbose: bool, output: &mut Output) {
    let brought_in = report.processes.iter().map(|process| process.host.brought_in_bytes).sum();
    output.line(format!(
        "brought {} of host memory in for the next pause of tenant '{}' in {}",
        units::bytes(brought_in),
        report.tenant,
        units::micros(report.wall_us)
    ));
    if verbose {
        output.table(&table(report));
    }
    output.lines(remarks(report));
}

fn table(report: &PrepareReport) -> Table {
    let header = ["PID", "HELD", "WANTED", "BROUGHT IN", "TIME", "TOUCHING", "PINNING", "COMMAND"];
    let mut table = output::table(&header, &[0, 1, 2, 3, 4, 5, 6]);
    for PreparedProcess { who, command, host } in &report.processes {
        let pid = who.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        let bytes = [host.held_bytes, host.wanted_bytes, host.brought_in_bytes];
        let times = [host.elapsed_us, host.touching_us, host.pinning_us]
            .map(|us| if us == 0 { "-".to_owned() } else { units::micros(us) });
        let figures = bytes.map(units::bytes_or_dash).into_iter().chain(times);
        table.add_row([pid].into_iter().chain(figures).chain([units::command(command)]));
    }
    table
}

fn remarks(report: &PrepareReport) -> impl Iterator<Item = String> {
    let of_process = |process: &PreparedProcess| {
        let who = process.who;
        let HostProgress { held_bytes, wanted_bytes, stage, .. } = &process.host;
        match stage {
            HostStage::Grows => Some(format!("{who} goes on; `sublet ps` shows how far it is")),
            HostStage::Waits => {
                Some(format!("{who} goes on after the pause or resume that is under way"))
            }
            HostStage::Stopped(failure) => Some(format!("NOT ALL: {failure}")),
            HostStage::Rests if held_bytes < wanted_bytes => {
                Some(format!("{who} was called off, or needs more by now; run this again"))
            }
            HostStage::Rests => None,
        }
    };
    let processes = report.processes.iter().filter_map(of_process);
    let failures = report.failures.iter().map(|failure| format!("NOT PREPARED: {failure}"));
    processes.chain(failures.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use tenants::coordinator::Who;
    use tenants::identity::MemberId;
    use tenants::wire::{Failure, FailureKind};

    use super::*;

    fn process(pid: u32, held_bytes: u64, stage: HostStage) -> PreparedProcess {
        PreparedProcess {
            who: Who { pid: Some(pid), member: MemberId(1) },
            command: "python train.py".to_owned(),
            host: HostProgress {
                held_bytes,
                wanted_bytes: 4 << 30,
                brought_in_bytes: 3 << 30,
                elapsed_us: 1_400_000,
                touching_us: 1_000_000,
                pinning_us: 300_000,
                stage,
                need: None,
            },
        }
    }

    #[test]
    fn what_came_in_and_what_it_took_is_listed_with_what_is_missing_and_why() {
        let failure = Failure {
            kind: FailureKind::OutOfHostMemory,
            message: "process 11: a tenth of the memory stays free: free host memory".to_owned(),
        };
        let report = PrepareReport {
            tenant: "train".to_owned(),
            wall_us: 1_500_000,
            processes: vec![
                process(10, 4 << 30, HostStage::Rests),
                process(11, 3 << 30, HostStage::Stopped(failure)),
                process(12, 3 << 30, HostStage::Grows),
            ],
            failures: Vec::new(),
        };
        assert!(!report.is_complete());
        let mut output = Output::default();
        render(&report, true, &mut output);
        let expected = "\
brought 9 GiB of host memory in for the next pause of tenant 'train' in 1.50 s
PID   HELD  WANTED  BROUGHT IN    TIME  TOUCHING  PINNING  COMMAND
 10  4 GiB   4 GiB       3 GiB  1.40 s    1.00 s   300 ms  python train.py
 11  3 GiB   4 GiB       3 GiB  1.40 s    1.00 s   300 ms  python train.py
 12  3 GiB   4 GiB       3 GiB  1.40 s    1.00 s   300 ms  python train.py
NOT ALL: process 11: a tenth of the memory stays free: free host memory
process 12 goes on; `sublet ps` shows how far it is
";
        assert_eq!(output.text(), expected);
    }

    #[test]
    fn progress_is_in_bytes_of_all_and_of_each() {
        let processes =
            [process(10, 4 << 30, HostStage::Rests), process(11, 1 << 30, HostStage::Grows)];
        let line = line_of(&TenantName::new("train").unwrap(), &processes);
        assert_eq!(
            line,
            "train: 5 GiB of 8 GiB of host memory ready (process 10 4 GiB, process 11 1 GiB)"
        );
    }
}
