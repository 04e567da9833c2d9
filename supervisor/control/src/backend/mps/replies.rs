//! The control program's answers, from text to types. Nothing here trusts the text to be what its
//! documentation shows.

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ServerStatus {
    Active,
    /// A client's fault broke every context; the server takes no client until all have gone.
    Fault,
    /// Something else: it comes up or has gone, say.
    Other(String),
}

/// Processes, as lists of servers and of clients name them: numbers between white space.
pub(super) fn pids(text: &str) -> Option<Vec<i32>> {
    text.split_whitespace().map(|word| word.parse().ok().filter(|pid| *pid > 0)).collect()
}

/// The answer to `get_server_status`. Where the control program does not know that command, a
/// listed server counts as taking clients.
pub(super) fn server_status(text: &str) -> ServerStatus {
    let text = text.trim();
    if !knows(text) {
        return ServerStatus::Active;
    }
    match text.to_ascii_uppercase().as_str() {
        "ACTIVE" => ServerStatus::Active,
        "FAULT" => ServerStatus::Fault,
        _ => ServerStatus::Other(text.to_owned()),
    }
}

/// Whether a client's work is off the GPU, by the answer to `terminate_client`: a message if
/// something is wrong, such as that it is no client, then a number, 0 for success.
pub(super) fn is_off(text: &str) -> bool {
    text.contains("Invalid process") || text.trim().lines().last() == Some("0")
}

/// Whether the program knew a command at all.
pub(super) fn knows(text: &str) -> bool {
    !text.contains("Unknown command")
}

/// The number behind `version` in the answer to `-v`, e.g. 13000.
pub(super) fn version(text: &str) -> Option<u32> {
    let behind = text.to_ascii_lowercase();
    let (_, behind) = behind.rsplit_once("version")?;
    let digits: String =
        behind.chars().skip_while(|c| !c.is_ascii_digit()).take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processes() {
        assert_eq!(pids("507\n"), Some(vec![507]));
        assert_eq!(pids("508 509\n510\n"), Some(vec![508, 509, 510]));
        assert_eq!(pids(""), Some(Vec::new()));
        for text in
            ["Server 507 not found\n", "Cannot find MPS control daemon process", "-1", "0", "99999999999"]
        {
            assert_eq!(pids(text), None, "{text}");
        }
    }

    #[test]
    fn states_of_a_server() {
        assert_eq!(server_status("ACTIVE\n"), ServerStatus::Active);
        assert_eq!(server_status("Unknown command \"get_server_status\""), ServerStatus::Active);
        assert_eq!(server_status("FAULT\n"), ServerStatus::Fault);
        for other in ["Initializing", "Server 12345 not found", "INACTIVE", ""] {
            assert_eq!(server_status(&format!("{other}\n")), ServerStatus::Other(other.to_owned()));
        }
    }

    #[test]
    fn what_became_of_a_termination() {
        assert!(is_off("0\n") && is_off("Invalid process 99999!\n1\n"));
        assert!(!is_off("1\n") && !is_off(""));
    }

    #[test]
    fn versions_and_commands() {
        assert_eq!(version("CUDA MPS Control for Linux/Unix/QNX. Binary version: 13000\n"), Some(13000));
        assert_eq!(version("CUDA MPS Control binary version: 13030"), Some(13030));
        assert_eq!(version("usage: ..."), None);
        assert!(!knows("Unknown command \"lspart\"\n"));
        assert!(knows("GPU GpuBackend free_chunks\n"));
    }
}
