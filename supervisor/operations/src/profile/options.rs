//! The command-line options of `shadowslice profile`. Error messages are rewritten to name these
//! options.

use std::path::{Path, PathBuf};
use std::time::Duration;

use shadowslice_config::WarmupConfig;
use shadowslice_shared::tensor::TensorSpec;
use shadowslice_shared::units::Percent;

/// The longest name of a model, in characters.
const MAX_NAME: usize = 128;

/// The configuration keys, and the options that set them.
const OPTIONS: [(&str, &str); 8] = [
    ("models[0].python.executable", "--python"),
    ("models[0].path", "MODEL"),
    ("models[0].profile", "--emulate"),
    ("models[0].batch.max", "--max-batch"),
    ("models[0].warmup", "--shape"),
    ("gpus[0].device", "--device"),
    ("gpus[0].sms", "--sms"),
    ("onnxruntime.library", "--library"),
];

/// Pairs of texts: the advice on configuration keys, and the advice on options that replaces it.
const ADVICE: [(&str, &str); 6] = [
    ("raise limits.response_bytes", "give a smaller --max-batch"),
    ("use a smaller batch.max", "give a smaller --max-batch"),
    ("set batch.max: 0 for this model", "give --max-batch 0"),
    ("set `batch: {max: 0}`", "give --max-batch 0"),
    ("batch.max is", "--max-batch is"),
    ("warmup.", "--shape "),
];

/// The command-line options of `profile`.
#[derive(Debug, clap::Args)]
pub struct ProfileOptions {
    /// The model: an ONNX file, a Python file, or a folder with a Python model.
    pub(super) model: PathBuf,
    /// The interpreter for a Python model [default: python3].
    #[arg(long, value_name = "EXECUTABLE")]
    pub(super) python: Option<PathBuf>,
    /// A GPU's index or UUID, or `emulated`.
    #[arg(long)]
    pub(super) device: String,
    /// The SMs of the emulated device.
    #[arg(long, allow_negative_numbers = true, default_value = "132")]
    pub(super) sms: u32,
    /// The profile whose times the emulated device reproduces.
    #[arg(long, value_name = "PROFILE.yaml")]
    pub(super) emulate: Option<PathBuf>,
    /// The shares to measure, with or without `%`.
    #[arg(long, value_delimiter = ',', default_value = "6,12,20,30,45,60,80,100")]
    pub(super) shares: Vec<Percent>,
    /// The largest batch size; powers of two up to this size are measured. Use 0 for a model
    /// without a batch axis.
    #[arg(long, allow_negative_numbers = true)]
    pub(super) max_batch: Option<u32>,
    /// The shape of an input with dynamic axes, without the batch axis. You can repeat this option.
    #[arg(long, value_name = "INPUT=AXISxAXIS", value_parser = shape)]
    pub(super) shape: Vec<(String, Vec<i64>)>,
    /// The number of timed batches of each size; as many untimed batches run first.
    #[arg(
        long,
        allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(1..=1_000_000),
        default_value = "20"
    )]
    pub(super) runs: u32,
    /// The time, in seconds, after which no further batch of a size starts.
    #[arg(long, allow_negative_numbers = true, value_parser = seconds, default_value = "2")]
    pub(super) seconds: Duration,
    /// The library of ONNX Runtime [default: the one that `serve` would choose].
    #[arg(long)]
    pub(super) library: Option<PathBuf>,
    /// The file for the profile [default: standard output].
    #[arg(long, short)]
    pub(super) output: Option<PathBuf>,
}

impl ProfileOptions {
    /// Returns the command line with only the options that select the measured model.
    pub(super) fn command(&self) -> String {
        let shapes = self.shape.iter().map(|(input, axes)| {
            let axes: Vec<_> = axes.iter().map(i64::to_string).collect();
            format!(" --shape {input}={}", axes.join("x"))
        });
        let shapes: String = shapes.collect();
        format!("shadowslice profile {} --device {}{shapes}", self.model.display(), self.device)
    }

    /// Returns the engine: Python for a Python file or a folder, and ONNX Runtime otherwise.
    pub(super) fn engine(&self) -> &'static str {
        let in_python = self.model.is_dir() || self.model.extension().is_some_and(|ending| ending == "py");
        if in_python { "python" } else { "onnxruntime" }
    }

    /// Returns the model's name: the file name without its extension. Characters that are not
    /// allowed in names are replaced.
    pub(super) fn name(&self) -> String {
        let stem = self.model.file_stem().unwrap_or_default().to_string_lossy();
        let fits = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
        let name: String =
            stem.chars().take(MAX_NAME).map(|letter| if fits(letter) { letter } else { '_' }).collect();
        if name.is_empty() { "model".to_owned() } else { name }
    }
}

/// Rewrites a message about the generated configuration file so that it names the options.
pub(super) fn with_options(text: &str, made_up: &Path) -> String {
    let place = format!("{}:", made_up.display());
    let line = |line: &str| {
        // The file name is followed by the line and the column.
        let fault = line.strip_prefix(&place).and_then(|rest| rest.split_once(": ")).map(|(_, fault)| fault);
        let Some(fault) = fault else { return line.to_owned() };
        let option = OPTIONS.iter().find_map(|(key, option)| Some((option, fault.strip_prefix(key)?)));
        option.map_or_else(|| fault.to_owned(), |(option, rest)| format!("{option}{rest}"))
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// Rewrites advice on configuration keys into advice on options.
pub(super) fn advice(text: &str) -> String {
    ADVICE.iter().fold(text.to_owned(), |text, (key, option)| text.replace(key, option))
}

/// Returns the inputs that have dynamic axes other than the batch axis and no given shape, followed
/// by advice. The time of a batch depends on the lengths of these axes, so the lengths must be
/// given.
pub(super) fn free_axes(
    inputs: &[TensorSpec],
    batched: bool,
    given: &WarmupConfig,
    command: &str,
) -> Option<String> {
    let rows = inputs.iter().map(|input| (&input.name, &input.shape[usize::from(batched)..]));
    let has_shape = |name: &str| given.inputs.get(name).is_some_and(|given| given.shape.is_some());
    let free: Vec<_> = rows.filter(|(name, axes)| axes.contains(&-1) && !has_shape(name)).collect();
    let shown = |axes: &[i64], free: &str, between: &str| {
        let axis = |&axis: &i64| if axis < 0 { free.to_owned() } else { axis.to_string() };
        axes.iter().map(axis).collect::<Vec<_>>().join(between)
    };
    let inputs: Vec<_> =
        free.iter().map(|(name, axes)| format!("{name} [{}]", shown(axes, "?", ", "))).collect();
    let options: Vec<_> =
        free.iter().map(|(name, axes)| format!("--shape {name}={}", shown(axes, "128", "x"))).collect();
    let (inputs, options) = (inputs.join(", "), options.join(" "));
    let advice = "give the shape of typical requests, without the batch axis, for example";
    (!free.is_empty()).then(|| format!("{inputs}; {advice}: {command} {options}"))
}

fn seconds(text: &str) -> Result<Duration, String> {
    let wrong = || "expected a number of seconds from 0 to 86400".to_owned();
    let seconds = text.parse().ok().filter(|seconds| (0.0..=86400.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(wrong)
}

fn shape(text: &str) -> Result<(String, Vec<i64>), String> {
    let wrong =
        || format!("invalid shape {text:?}; give an input's name and its axes, for example image=3x224x224");
    let (name, axes) = text.split_once('=').ok_or_else(wrong)?;
    let axes = axes.split('x').map(|axis| axis.parse().ok().filter(|&axis| axis > 0));
    Ok((name.to_owned(), axes.collect::<Option<_>>().ok_or_else(wrong)?))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use clap::Parser;
    use shadowslice_config::WarmupInput;
    use shadowslice_shared::batch::RunFailure;

    use super::*;
    use shadowslice_control::process::plan_warm_up;

    #[derive(Debug, clap::Parser)]
    struct Command {
        #[command(flatten)]
        options: ProfileOptions,
    }

    fn parsed(arguments: &[&str]) -> Result<ProfileOptions, clap::Error> {
        let all = [&["profile", "my model.onnx", "--device", "emulated"], arguments].concat();
        Command::try_parse_from(all).map(|command| command.options)
    }

    #[test]
    fn shapes_on_the_command_line() {
        assert_eq!(shape("image=3x224x224"), Ok(("image".to_owned(), vec![3, 224, 224])));
        for nonsense in ["image", "image=", "image=3x", "image=0", "image=-1x3"] {
            assert!(shape(nonsense).is_err(), "{nonsense}");
        }
    }

    #[test]
    fn invalid_numbers_are_refused_with_their_valid_range() {
        for (option, nonsense, advice) in [
            ("--seconds", "nan", "from 0 to 86400"),
            ("--seconds", "-1", "from 0 to 86400"),
            ("--seconds", "inf", "from 0 to 86400"),
            ("--seconds", "1e30", "from 0 to 86400"),
            ("--runs", "0", "1..=1000000"),
            ("--runs", "4294967295", "1..=1000000"),
            ("--max-batch", "-1", "0..=4294967295"),
        ] {
            let fault = parsed(&[option, nonsense]).unwrap_err().to_string();
            assert!(fault.contains(option) && fault.contains(advice), "{fault}");
        }
        let options = parsed(&["--seconds", "0", "--runs", "1"]).unwrap();
        assert_eq!((options.seconds, options.runs), (Duration::ZERO, 1));
    }

    #[test]
    fn a_files_stem_becomes_a_name() {
        let mut options = parsed(&[]).unwrap();
        assert_eq!(options.name(), "my_model");
        for (file, name) in [("a/b-1.2.onnx", "b-1.2"), ("größe.onnx", "gr__e"), ("..", "model")] {
            options.model = file.into();
            assert_eq!(options.name(), name);
        }
    }

    #[test]
    fn errors_in_the_generated_configuration_name_options() {
        let made_up = Path::new("/tmp/profile-1/profile.yaml");
        let text = "/tmp/profile-1/profile.yaml:1:9: models[0].path: gone\n\
                    /tmp/profile-1/profile.yaml:1:9: models[0].warmup.x: odd\n\
                    /tmp/profile-1/profile.yaml:1:9: models[0].queue: odd\ngiven.yaml:5:6: execution_ms.1: short";
        assert_eq!(
            with_options(text, made_up),
            "MODEL: gone\n--shape.x: odd\nmodels[0].queue: odd\ngiven.yaml:5:6: execution_ms.1: short"
        );
    }

    #[test]
    fn a_workers_advice_names_options() {
        let too_large = RunFailure::AnswerTooLarge { needed: 9, room: 8 };
        let advised = advice(&too_large.to_string());
        assert_eq!(advised, "the answer has 9 bytes and only 8 fit; give a smaller --max-batch");
        let of_shape = WarmupInput { shape: Some(vec![5]), values: None };
        let given = WarmupConfig { file: None, inputs: BTreeMap::from([("x".to_owned(), of_shape)]) };
        let unknown = plan_warm_up(&[], true, vec![1], &given).unwrap_err();
        assert_eq!(
            advice(&unknown.to_string()),
            "the model cannot be loaded: --shape x: the model has no such input"
        );
    }
}
