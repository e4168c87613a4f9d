//! `sublet plan train`: whether a training with `sublet.paged` fits, and what its step takes, by a formula and without a GPU.
//!
//! The formula is for models of Llama's kind with a vocabulary of 32,000, weights and both moments of Adam in fp32, autocast to bf16, and
//! gradient checkpointing. The frames of a step are used in the best order (Belady's), as `benchmarks/larger_models.py` has it. The tests
//! compare it with records.

use std::process::ExitCode;

use clap::Args;
use tenants::size::Size;

use crate::failure::{EXIT_UNCHANGED, Failure};
use crate::output::{self, Output};

/// Bytes in a GiB.
const GIB: f64 = 1_073_741_824.0;
/// Entries of the vocabulary.
const VOCABULARY: f64 = 32_000.0;
/// A model's width, divided by the number of its layers.
const WIDTH_A_LAYER: f64 = 112.0;
/// The narrowest model whose matrix products reach a card's rate.
const FULL_WIDTH: f64 = 4096.0;
/// The step, divided by the larger of the times of compute and of the link: in the middle of the records.
const OVER_BOUND: f64 = 1.08;
/// The least tokens at a time: fewer are not worth a copy of the weights.
const TOKENS_MIN: f64 = 512.0;
/// The part of host memory that may be pinned.
const HOST_PART: f64 = 0.9;

/// A kind of card, by the size of its memory.
struct Card {
    /// The most memory of such a card, in GiB.
    gib_max: f64,
    /// Floating-point operations of a training, a second.
    flops: f64,
    /// Bytes to the GPU, a second.
    link: f64,
    /// The card, and the source of both figures.
    source: &'static str,
}

/// Of cards that no record has, compute is the part of the data sheet's rate that an H100 reached.
const CARDS: [Card; 3] = [
    Card { gib_max: 24.0, flops: 68e12, link: 25e9, source: "calculated for an RTX 4090" },
    Card { gib_max: 48.0, flops: 149e12, link: 25e9, source: "calculated for an L40S" },
    Card { gib_max: f64::INFINITY, flops: 407e12, link: 45e9, source: "measured on an H100" },
];

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// A training
    #[arg(value_parser = ["train"], value_name = "train")]
    _what: String,
    /// Parameters of the model, such as 7B
    #[arg(long, value_name = "NUMBER", value_parser = number)]
    params: f64,
    /// Memory of the GPU, such as 24GiB
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    gpu: f64,
    /// Memory of the host, such as 128GiB
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    host: f64,
    /// Tokens of a step, such as 8k
    #[arg(long, value_name = "NUMBER", value_parser = number)]
    tokens: f64,
}

/// A training's frames, needs and times: in bytes and seconds.
#[derive(Debug)]
struct Planned {
    weight_frames: f64,
    state_frames: f64,
    host: f64,
    /// Tokens of a forward and backward.
    micro_batch: f64,
    compute_s: f64,
    step_s: f64,
}

/// Such as 7B, 350M, 8k (of 1,024) and 16384.
fn number(text: &str) -> Result<f64, String> {
    let units = [("B", 1e9), ("M", 1e6), ("k", 1024.0), ("K", 1024.0), ("", 1.0)];
    let read = |(unit, by): (&str, f64)| Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * by);
    let number = units.into_iter().find_map(read).filter(|number| (1.0..1e15).contains(number));
    number.ok_or_else(|| "no number: say for example 7B, 350M or 8k".to_owned())
}

fn bytes(text: &str) -> Result<f64, String> {
    let Size(bytes) = text.parse().map_err(|error: tenants::size::NoSize| error.to_string())?;
    let mib = u32::try_from(bytes >> 20).ok().filter(|mib| *mib > 0);
    let mib = mib.ok_or("no memory of a machine: say for example 24GiB")?;
    Ok(f64::from(mib) * 1_048_576.0)
}

impl PlanArgs {
    fn card(&self) -> &'static Card {
        let holds = |card: &&Card| self.gpu <= card.gib_max * GIB;
        CARDS.iter().find(holds).unwrap_or(&CARDS[CARDS.len() - 1])
    }

    /// The width of a model with so many parameters: twelve squares of it a layer.
    fn width(&self) -> f64 {
        (self.params * WIDTH_A_LAYER / 12.0).cbrt()
    }

    /// Device memory for all but weights, state and gradients: contexts, what each layer saves, one layer's own, and logits.
    fn room(&self, tokens: f64) -> f64 {
        let width = self.width();
        1.2e9 + tokens * (4.0 * width * width / WIDTH_A_LAYER + 71.0 * width + 12.0 * VOCABULARY)
    }

    fn row(&self, card: &Card) -> Result<Planned, String> {
        let (weights, state, gradients) = (4.0 * self.params, 8.0 * self.params, 4.0 * self.params);
        // The largest parameter is a vocabulary's; the optimizer has two moments of it. Two of each, so that one comes while the other is used.
        let block = 4.0 * self.width() * VOCABULARY;
        let (least_weights, least_state) = (weights.min(2.0 * block), state.min(4.0 * block));
        let rest = |micro_batch: f64| {
            let kept = if micro_batch < self.tokens { gradients } else { 0.0 };
            self.gpu - self.room(micro_batch) - kept
        };
        let mut micro_batch = self.tokens;
        while rest(micro_batch) < least_weights + least_state {
            micro_batch /= 2.0;
            if micro_batch < TOKENS_MIN.min(self.tokens) {
                let least = self.room(self.tokens) + least_weights + least_state;
                return Err(format!(
                    "the GPU is too small for {} tokens a step: {:.0} GiB are needed; give fewer tokens or a larger GPU",
                    self.tokens,
                    (least / GIB).ceil()
                ));
            }
        }
        let weight_frames = weights.min(rest(micro_batch) - least_state);
        let state_frames = state.min(rest(micro_batch) - weight_frames);
        let (away, state_away) = (weights - weight_frames, state - state_frames);
        // A paged state has all of its places on the host. It is not paged if the GPU has room for all, with gradients.
        let is_whole = rest(self.tokens) >= weights + state + gradients;
        let of = |total: f64, stays: bool| if stays { 0.0 } else { total };
        let host = of(weights, away <= 0.0) + of(state, is_whole);
        if host > HOST_PART * self.host {
            return Err(format!(
                "the host is too small: {:.0} GiB are pinned there, and a tenth stays free; give --host {:.0}GiB or more",
                host / GIB,
                (host / HOST_PART / GIB).ceil()
            ));
        }
        let Card { flops, link, .. } = card;
        let compute_s =
            8.0 * self.params * self.tokens / flops / (self.width() / FULL_WIDTH).min(1.0).sqrt();
        // Weights come for forward and for backward.
        let (weights_s, state_s) =
            (2.0 * away * (self.tokens / micro_batch) / link, state_away / link);
        // With several micro-batches the optimizer steps after the last backward.
        let bound_s = if micro_batch < self.tokens {
            compute_s.max(weights_s) + state_s
        } else {
            compute_s.max(weights_s + state_s)
        };
        let over_bound = if host > 0.0 { OVER_BOUND } else { 1.0 };
        let step_s = bound_s * over_bound;
        Ok(Planned { weight_frames, state_frames, host, micro_batch, compute_s, step_s })
    }

    /// The cells of [`COLUMNS`].
    fn cells(&self) -> Result<[String; 6], String> {
        let row = self.row(self.card())?;
        let gib = |bytes: f64| format!("{:.1} GiB", bytes / GIB);
        Ok([
            gib(row.weight_frames),
            gib(row.state_frames),
            gib(row.host),
            format!("{}", self.tokens),
            format!("{}", row.micro_batch.floor()),
            format!("{:.2}", row.step_s / row.compute_s),
        ])
    }
}

const COLUMNS: [&str; 6] = ["WEIGHTS", "OPTIMIZER", "HOST", "TOKENS", "AT A TIME", "STEP/COMPUTE"];

pub(crate) fn plan(args: &PlanArgs, output: &mut Output) -> Result<ExitCode, Failure> {
    let cells = args.cells().map_err(|why| Failure::new(why, EXIT_UNCHANGED))?;
    let mut table = output::table(&COLUMNS, &[0, 1, 2, 3, 4, 5]);
    table.add_row(cells);
    output.table(&table);
    let Card { flops, link, source, .. } = args.card();
    output.line(format!(
        "calculated, with {:.0} TFLOP/s and {:.0} GB/s of link ({source}); WEIGHTS and OPTIMIZER are `frames` for sublet.paged",
        flops / 1e12,
        link / 1e9
    ));
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::{env, fs};

    use clap::Parser as _;
    use serde_json::Value;

    use super::*;
    use crate::args::{Cli, Command};

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
    }

    fn asked(line: &str) -> PlanArgs {
        let command = Cli::try_parse_from(line.split(' ')).unwrap().command;
        let Command::Plan(args) = command else { panic!("{command:?}") };
        args
    }

    /// A row of a record, what it ran, and the row with all on the GPU.
    struct Recorded {
        name: &'static str,
        row: &'static str,
        whole: &'static str,
        params: &'static str,
        tokens: u32,
    }

    const RECORDS: [Recorded; 3] = [
        Recorded {
            name: "larger-7b-1xh200-c5b13c2",
            row: "7b",
            whole: "7b_bound",
            params: "6738M",
            tokens: 16384,
        },
        Recorded {
            name: "larger-7b-1xh100-9165031",
            row: "7b",
            whole: "7b_bound",
            params: "6738M",
            tokens: 16384,
        },
        Recorded {
            name: "larger-8k-1xh100-9165031",
            row: "wo_sixth",
            whole: "resident",
            params: "2067M",
            tokens: 8192,
        },
    ];

    /// Figures of a record that a plan has too, and the GPU memory that was used.
    struct Measured {
        gpu: String,
        used: f64,
        frames: [f64; 2],
        host: f64,
        ratio: f64,
    }

    impl Recorded {
        fn read(&self) -> Measured {
            let path = root().join(format!("benchmarks/results/{}.json", self.name));
            let record: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
            let figure = |at: String| record.pointer(&at).and_then(Value::as_f64).unwrap();
            let took = |row| figure(format!("/summary/{row}_step_s/median"));
            let reports = record["facts"][self.row]["report"].as_array().unwrap();
            let of = |is_of_weights: bool, field: &str| {
                let is_it = |each: &&Value| each.get("module").is_some() == is_of_weights;
                reports.iter().find(is_it).unwrap()[field].as_f64().unwrap()
            };
            Measured {
                gpu: record["gpu"]["name"].as_str().unwrap().replace(" 80GB HBM3", ""),
                used: figure(format!("/facts/{}/device_bytes", self.row)),
                frames: [of(true, "frames_bytes"), of(false, "frames_bytes")],
                host: of(true, "paged_bytes") + of(false, "paged_bytes"),
                ratio: took(self.row) / took(self.whole),
            }
        }
    }

    #[test]
    fn rows_are_within_a_tenth_of_what_was_recorded() {
        for recorded in RECORDS {
            let Recorded { name, params, tokens, .. } = recorded;
            let measured = recorded.read();
            let mut args = asked(&format!(
                "sublet plan train --params {params} --gpu 80GiB --host 256GiB --tokens {tokens}"
            ));
            args.gpu = measured.used;
            let planned = args.row(&CARDS[2]).unwrap();
            let near = |what: &str, planned: f64, recorded: f64| {
                let off = planned / recorded;
                assert!((0.9..1.1).contains(&off), "{name}: {what}: {planned} for {recorded}");
            };
            near("step over compute", planned.step_s / planned.compute_s, measured.ratio);
            near("host memory", planned.host, measured.host);
            let frames = planned.weight_frames + planned.state_frames;
            near("frames", frames, measured.frames.iter().sum());
        }
    }

    /// The table of the page, from its head on.
    fn page_table() -> String {
        let mut lines = vec![
            "| model | GPU | weights | optimizer | host memory | tokens a step | at a time | step over compute | figures |".to_owned(),
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |".to_owned(),
        ];
        for params in ["2B", "7B", "14B"] {
            for gpu in [24, 48, 80] {
                let line = format!(
                    "sublet plan train --params {params} --gpu {gpu}GiB --host 256GiB --tokens 8k"
                );
                let cells = asked(&line).cells().unwrap().join(" | ");
                lines.push(format!("| {params} | {gpu} GiB | {cells} | calculated |"));
            }
        }
        for recorded in RECORDS {
            let Measured { gpu, used, frames, host, ratio } = recorded.read();
            let [weights, state, host] =
                [frames[0], frames[1], host].map(|bytes| format!("{:.1} GiB", bytes / GIB));
            let model = number(recorded.params).unwrap() / 1e9;
            let (tokens, name) = (recorded.tokens, recorded.name);
            lines.push(format!(
                "| {model:.1}B | {:.1} GiB of an {gpu} | {weights} | {state} | {host} | {tokens} | {tokens} | {ratio:.2} | [measured](../benchmarks/results/{name}.json) |",
                used / GIB
            ));
        }
        lines.join("\n") + "\n"
    }

    #[test]
    fn the_page_has_the_table_of_the_formula() {
        let path = root().join("docs/larger-than-memory.md");
        let page = fs::read_to_string(&path).unwrap();
        let start = page.find("| model | GPU |").unwrap();
        let end = start + page[start..].find("\n\n").unwrap() + 1;
        let made = page_table();
        if env::var_os("SUBLET_WRITE_PLAN").is_some() {
            fs::write(&path, format!("{}{made}{}", &page[..start], &page[end..])).unwrap();
        }
        let page = fs::read_to_string(&path).unwrap();
        assert!(
            page.contains(&made),
            "SUBLET_WRITE_PLAN=1 cargo test -p sublet-cli larger writes it"
        );
    }
}
