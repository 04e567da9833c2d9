//! The paths of HTTP requests.

use hyper::Method;
use percent_encoding::percent_decode_str;

use super::openai::{OpenAiEndpoint, PREFIX};

/// The maximum number of segments after `/v2`. No endpoint has more.
const MAX_SEGMENTS: usize = 5;

const SYSTEM: &str = "systemsharedmemory";
const CUDA: &str = "cudasharedmemory";

/// A path that names an endpoint.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ApiPath {
    pub(super) endpoint: Endpoint,
    /// The name of the model or of the region. An empty name means all of them.
    pub(super) name: String,
    /// The version of the model. An empty version means the only version.
    pub(super) version: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Endpoint {
    Live,
    Ready,
    Server,
    Metadata,
    ModelReady,
    Config,
    Statistics,
    Infer,
    Generate,
    GenerateStream,
    Index,
    Load,
    Unload,
    RegionStatus,
    RegisterRegion,
    UnregisterRegion,
    CudaStatus,
    RegisterCuda,
    UnregisterCuda,
    Tracing,
    Logging,
    OpenAi(OpenAiEndpoint),
}

impl ApiPath {
    /// Parses a path. Names are percent-decoded after the path is split, so they may contain
    /// slashes.
    pub(super) fn parse(path: &str) -> Option<Self> {
        if let Some(path) = path.strip_prefix(PREFIX) {
            return Self::parse_openai(path);
        }
        let mut segments = [""; MAX_SEGMENTS];
        let mut count = 0;
        for segment in path.strip_prefix("/v2")?.split('/').skip(1) {
            *segments.get_mut(count)? = segment;
            count += 1;
        }
        let (endpoint, name, version) = match segments[..count] {
            [] if path == "/v2" => (Endpoint::Server, "", ""),
            [""] => (Endpoint::Server, "", ""),
            ["health", "live"] => (Endpoint::Live, "", ""),
            ["health", "ready"] => (Endpoint::Ready, "", ""),
            ["models", "stats"] => (Endpoint::Statistics, "", ""),
            ["models", model] => (Endpoint::Metadata, model, ""),
            ["models", _, "trace", "setting"] | ["trace", "setting"] => (Endpoint::Tracing, "", ""),
            ["models", model, "versions", version] => (Endpoint::Metadata, model, version),
            ["models", model, endpoint] => (Endpoint::of_model(endpoint)?, model, ""),
            ["models", model, "versions", version, endpoint] => {
                (Endpoint::of_model(endpoint)?, model, version)
            }
            ["repository", "index"] => (Endpoint::Index, "", ""),
            ["repository", "models", model, "load"] => (Endpoint::Load, model, ""),
            ["repository", "models", model, "unload"] => (Endpoint::Unload, model, ""),
            [SYSTEM, "status"] => (Endpoint::RegionStatus, "", ""),
            [SYSTEM, "unregister"] => (Endpoint::UnregisterRegion, "", ""),
            [SYSTEM, "region", name, "status"] => (Endpoint::RegionStatus, name, ""),
            [SYSTEM, "region", name, "register"] => (Endpoint::RegisterRegion, name, ""),
            [SYSTEM, "region", name, "unregister"] => (Endpoint::UnregisterRegion, name, ""),
            [CUDA, "status"] => (Endpoint::CudaStatus, "", ""),
            [CUDA, "unregister"] => (Endpoint::UnregisterCuda, "", ""),
            [CUDA, "region", name, "status"] => (Endpoint::CudaStatus, name, ""),
            [CUDA, "region", name, "register"] => (Endpoint::RegisterCuda, name, ""),
            [CUDA, "region", name, "unregister"] => (Endpoint::UnregisterCuda, name, ""),
            ["logging"] => (Endpoint::Logging, "", ""),
            _ => return None,
        };
        Some(Self { endpoint, name: decode(name)?, version: decode(version)? })
    }
}

impl ApiPath {
    /// Parses a path of OpenAI's API after its prefix.
    fn parse_openai(path: &str) -> Option<Self> {
        let (endpoint, name) = match path.split_once('/') {
            None if path == "embeddings" => (OpenAiEndpoint::Embeddings, ""),
            None if path == "completions" => (OpenAiEndpoint::Completions, ""),
            None if path == "models" => (OpenAiEndpoint::Models, ""),
            Some(("models", name)) => (OpenAiEndpoint::Model, name),
            _ => return None,
        };
        Some(Self { endpoint: Endpoint::OpenAi(endpoint), name: decode(name)?, version: String::new() })
    }
}

impl Endpoint {
    fn of_model(name: &str) -> Option<Self> {
        match name {
            "" => Some(Self::Metadata),
            "ready" => Some(Self::ModelReady),
            "config" => Some(Self::Config),
            "stats" => Some(Self::Statistics),
            "infer" => Some(Self::Infer),
            "generate" => Some(Self::Generate),
            "generate_stream" => Some(Self::GenerateStream),
            _ => None,
        }
    }

    pub(super) fn method(self) -> Method {
        match self {
            Self::Infer | Self::Generate | Self::GenerateStream => Method::POST,
            Self::OpenAi(endpoint) if endpoint.is_inference() => Method::POST,
            Self::Index | Self::Load | Self::Unload => Method::POST,
            Self::RegisterRegion | Self::UnregisterRegion => Method::POST,
            Self::RegisterCuda | Self::UnregisterCuda => Method::POST,
            _ => Method::GET,
        }
    }

    /// Returns whether the endpoint accepts a method. HEAD is answered like GET, and hyper omits
    /// the body. An unsupported extension is refused for every method.
    pub(super) fn accepts(self, method: &Method) -> bool {
        let method = if *method == Method::HEAD { &Method::GET } else { method };
        matches!(self, Self::Tracing | Self::Logging) || *method == self.method()
    }
}

fn decode(segment: &str) -> Option<String> {
    percent_decode_str(segment).decode_utf8().ok().map(String::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_name_the_endpoints_of_the_protocol() {
        for (path, endpoint, name, version) in [
            ("/v2", Endpoint::Server, "", ""),
            ("/v2/", Endpoint::Server, "", ""),
            ("/v2/health/live", Endpoint::Live, "", ""),
            ("/v2/health/ready", Endpoint::Ready, "", ""),
            ("/v2/models/m", Endpoint::Metadata, "m", ""),
            ("/v2/models/m/", Endpoint::Metadata, "m", ""),
            ("/v2/models/m/versions/1", Endpoint::Metadata, "m", "1"),
            ("/v2/models/m/config", Endpoint::Config, "m", ""),
            ("/v2/models/stats", Endpoint::Statistics, "", ""),
            ("/v2/models/m/versions/1/stats", Endpoint::Statistics, "m", "1"),
            ("/v2/models/m/versions/1/infer", Endpoint::Infer, "m", "1"),
            ("/v2/models/m/generate", Endpoint::Generate, "m", ""),
            ("/v1/embeddings", Endpoint::OpenAi(OpenAiEndpoint::Embeddings), "", ""),
            ("/v1/models", Endpoint::OpenAi(OpenAiEndpoint::Models), "", ""),
            ("/v1/models/a%2Fb", Endpoint::OpenAi(OpenAiEndpoint::Model), "a/b", ""),
            ("/v2/models/m/versions/1/generate_stream", Endpoint::GenerateStream, "m", "1"),
            ("/v2/models/a%2Fb%20%C3%A9/ready", Endpoint::ModelReady, "a/b é", ""),
            ("/v2/repository/models/m/load", Endpoint::Load, "m", ""),
            ("/v2/systemsharedmemory/region/a%2Fb/register", Endpoint::RegisterRegion, "a/b", ""),
            ("/v2/cudasharedmemory/status", Endpoint::CudaStatus, "", ""),
            ("/v2/models/m/trace/setting", Endpoint::Tracing, "", ""),
        ] {
            let expected = ApiPath { endpoint, name: name.to_owned(), version: version.to_owned() };
            assert_eq!(ApiPath::parse(path), Some(expected), "{path}");
        }
    }

    #[test]
    fn other_paths_name_no_endpoint() {
        for path in [
            "/",
            "",
            "/v1",
            "/v2x",
            "/v2/models",
            "/v2/models/m/versions",
            "/v2/models/m/x",
            "/v2/a",
            "/v1/x",
        ] {
            assert_eq!(ApiPath::parse(path), None, "{path}");
        }
        assert_eq!(ApiPath::parse("/v2/models/%FF/infer"), None);
    }
}
