//! `sublet save`: writes the saved contents of a tenant to files.

use std::process::ExitCode;

use comfy_table::Table;
use tenants::coordinator::{Coordinator, Options};
use tenants::identity::TenantName;
use tenants::keep::map::{SavedProcess, TENANT_MAP};
use tenants::keep::{self, SaveReport, SaveState};
use tenants::run_dir::RunDir;
use tenants::saving::SaveAccount;

use crate::args::SaveArgs;
use crate::failure::{EXIT_PARTIAL, Failure};
use crate::output::{self, Output};
use crate::progress::{Progress, bytes_line};
use crate::signals;
use crate::units;

pub(crate) fn save(
    args: &SaveArgs,
    run_dir: &RunDir,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let options = Options { interrupt: Some(signals::watch()?), ..Options::default() };
    let coordinator = Coordinator::new(run_dir.clone(), args.tenant.clone(), options);
    let result = {
        let progress = Progress::start(args.show, run_dir);
        let mut say = |states: &[_]| progress.say(line_of(&args.tenant, states));
        keep::save(&coordinator, &args.dir, &mut say)
    };
    let report = result?;
    if args.show.json {
        output.json(&report)?;
    } else {
        render(&report, args.show.verbose, output);
    }
    Ok(if report.map.complete { ExitCode::SUCCESS } else { ExitCode::from(EXIT_PARTIAL) })
}

/// Returns a line with the progress of all processes together, and of each.
fn line_of(tenant: &TenantName, states: &[SaveState]) -> String {
    let of = |state: &SaveState| (state.who, state.written_bytes, state.total_bytes);
    bytes_line(tenant, "written", states.iter().map(of))
}

fn render(report: &SaveReport, verbose: bool, output: &mut Output) {
    let map = &report.map;
    let total = map.processes.iter().map(|process| process.account.saved_bytes).sum();
    output.line(format!(
        "wrote {} of tenant '{}' to {} in {}",
        units::bytes(total),
        map.tenant,
        report.dir.display(),
        units::micros(report.wall_us)
    ));
    if verbose {
        output.table(&table(report));
    }
    remarks(report, output);
}

fn table(report: &SaveReport) -> Table {
    let map = &report.map;
    let header = ["PID", "SAVED", "NOT KEPT", "IN PLACE", "IMPORTED", "MAP"];
    let mut table = output::table(&header, &[0, 1, 2, 3, 4]);
    for SavedProcess { process, map, account } in &map.processes {
        let SaveAccount { saved_bytes, not_kept_bytes, in_place_bytes, imported_bytes } = *account;
        let bytes = [saved_bytes, not_kept_bytes, in_place_bytes, imported_bytes];
        let bytes = bytes.map(units::bytes_or_dash);
        table.add_row([process.pid.to_string()].into_iter().chain(bytes).chain([map.clone()]));
    }
    table
}

/// Prints missing contents, missing processes, and the file to read first.
fn remarks(report: &SaveReport, output: &mut Output) {
    let map = &report.map;
    let accounts = || map.processes.iter().map(|process| process.account);
    if accounts().any(|account| account.not_kept_bytes > 0) {
        output.line("not kept: contents that were to be discarded, or that the application had said are unused");
    }
    if accounts().any(|account| account.in_place_bytes > 0) {
        output.line("in place: memory that is on its GPU now, and was not read");
    }
    if accounts().any(|account| account.imported_bytes > 0) {
        output.line("imported: memory of other processes, which is in its owners' files");
    }
    for process in &map.nothing_saved {
        output.line(format!("process {} has nothing saved: {}", process.pid, process.command));
    }
    if report.ended > 0 {
        output.line(format!(
            "{} of the tenant had ended, and their saved contents are lost",
            units::counted(report.ended, "process", "processes")
        ));
    }
    for failed in &map.failed {
        let who =
            failed.pid.map_or(format!("member {}", failed.member), |pid| format!("process {pid}"));
        output.line(format!("NOT WRITTEN: {who}: {}", failed.why));
    }
    output.line(format!(
        "the tenant stays as it was; {} says what is where (save.md in the folder of `sublet docs`)",
        report.dir.join(TENANT_MAP).display()
    ));
}

#[cfg(test)]
mod tests {
    use tenants::coordinator::Who;
    use tenants::identity::MemberId;
    use tenants::keep::map::{FailedProcess, ProcessName, TenantMap};
    use tenants::wire::MemberState;

    use super::*;

    fn report() -> SaveReport {
        let process = |pid: u32| ProcessName {
            pid,
            member: MemberId(u64::from(pid)).to_string(),
            command: "python train.py".to_owned(),
            state: MemberState::Paused,
        };
        let account = SaveAccount {
            saved_bytes: 3 << 30,
            not_kept_bytes: 1 << 30,
            in_place_bytes: 0,
            imported_bytes: 2 << 20,
        };
        let map = "process-10-000000000000000a.json".to_owned();
        SaveReport {
            dir: "/data/saved".into(),
            wall_us: 4_200_000,
            ended: 1,
            map: TenantMap {
                format: "sublet-save".to_owned(),
                version: 1,
                tenant: "train".to_owned(),
                complete: false,
                processes: vec![SavedProcess { process: process(10), map, account }],
                nothing_saved: vec![process(11)],
                failed: vec![FailedProcess {
                    pid: Some(12),
                    member: MemberId(12).to_string(),
                    why: "it has ended (python train.py)".to_owned(),
                }],
            },
        }
    }

    #[test]
    fn what_was_written_and_what_was_not_is_listed() {
        let mut output = Output::default();
        render(&report(), true, &mut output);
        let expected = "\
wrote 3 GiB of tenant 'train' to /data/saved in 4.20 s
PID  SAVED  NOT KEPT  IN PLACE  IMPORTED  MAP
 10  3 GiB     1 GiB         -     2 MiB  process-10-000000000000000a.json
not kept: contents that were to be discarded, or that the application had said are unused
imported: memory of other processes, which is in its owners' files
process 11 has nothing saved: python train.py
1 process of the tenant had ended, and their saved contents are lost
NOT WRITTEN: process 12: it has ended (python train.py)
the tenant stays as it was; /data/saved/tenant.json says what is where (save.md in the folder of `sublet docs`)
";
        assert_eq!(output.text(), expected);
    }

    #[test]
    fn progress_is_in_bytes_of_all_and_of_each() {
        let state = |pid, written_bytes| SaveState {
            who: Who { pid: Some(pid), member: MemberId(1) },
            total_bytes: 2 << 30,
            written_bytes,
        };
        let line = line_of(
            &TenantName::new("train").unwrap(),
            &[state(10, 1 << 30), state(11, 512 << 20)],
        );
        assert_eq!(line, "train: 1.5 GiB of 4 GiB written (process 10 1 GiB, process 11 512 MiB)");
    }
}
