// Command trinity-mq-submit hands a task to a running trinity-mq.
//
//	trinity-mq-submit -run NAME -task '{"raw_task": {"question": "1+1=", "answer": "2"}}' -wait 60s
//
// Without -wait it returns once the broker has the task. With it, standard output gets the outcome as one line of JSON,
// and with -experiences one more line for each experience. Exit status: 0 handed over, or finished or partial; 1
// otherwise; 2 usage.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"trinitymq"
)

const (
	urlVariable    = "TRINITY_MQ_BROKER_URL"
	connectTimeout = 30 * time.Second
)

type words struct {
	broker, run, id string
	task            trinitymq.Task
	wait            time.Duration
	experiences     bool
}

func main() {
	asked, err := parse(os.Args[1:], os.Stdin, os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "trinity-mq-submit:", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	ok, err := submit(ctx, asked)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "trinity-mq-submit:", err)
	}
	if errors.Is(err, trinitymq.ErrInvalid) {
		os.Exit(2)
	}
	if !ok || err != nil {
		os.Exit(1)
	}
}

func parse(arguments []string, stdin io.Reader, stderr io.Writer) (*words, error) {
	asked := &words{}
	var task string
	flags := flag.NewFlagSet("trinity-mq-submit", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&asked.broker, "broker", os.Getenv(urlVariable),
		"amqp://user:password@host:port/vhost; "+urlVariable+" keeps it out of the list of processes")
	flags.StringVar(&asked.run, "run", "", "name of the run")
	flags.StringVar(&task, "task", "", "the task: JSON, @FILE or - for standard input")
	flags.StringVar(&asked.id, "id", "", "submission id: a task of the same id is done once (default: a random one)")
	flags.DurationVar(&asked.wait, "wait", 0, "how long to wait for the outcome, such as 60s or 10m (default: not at all)")
	flags.BoolVar(&asked.experiences, "experiences", false, "print the experiences too, a line each")
	if err := flags.Parse(arguments); err != nil {
		return nil, err
	}
	switch {
	case flags.NArg() > 0:
		return nil, fmt.Errorf("unknown word %q", flags.Arg(0))
	case asked.broker == "" || asked.run == "" || task == "":
		return nil, errors.New("-broker (or " + urlVariable + "), -run and -task are wanted; -h tells more")
	case asked.wait < 0 || asked.experiences && asked.wait == 0:
		return nil, errors.New("-wait must be positive, and -experiences needs it")
	}
	text, err := read(task, stdin)
	if err != nil {
		return nil, err
	}
	asked.task, err = trinitymq.ParseTask(text)
	return asked, err
}

func read(task string, stdin io.Reader) ([]byte, error) {
	if task == "-" {
		return io.ReadAll(stdin)
	}
	if strings.HasPrefix(task, "@") {
		return os.ReadFile(task[1:])
	}
	return []byte(task), nil
}

// submit reports whether the task was handed over, or, when waited for, has finished runs.
func submit(ctx context.Context, asked *words) (bool, error) {
	connecting, connected := context.WithTimeout(ctx, connectTimeout)
	defer connected()
	client, err := trinitymq.Connect(connecting, asked.broker, asked.run,
		trinitymq.WithName("trinity-mq-submit"),
		trinitymq.WithLog(func(line string) { fmt.Fprintln(os.Stderr, line) }))
	if err != nil {
		return false, err
	}
	defer client.Close()
	if asked.wait == 0 {
		publishing, published := context.WithTimeout(ctx, connectTimeout)
		defer published()
		id, err := client.Publish(publishing, asked.task, asked.id)
		if err != nil {
			return false, err
		}
		fmt.Fprintln(os.Stderr, "submitted", id)
		return true, nil
	}
	waiting, waited := context.WithTimeout(ctx, asked.wait)
	defer waited()
	options := trinitymq.SubmitOptions{ID: asked.id, WantExperiences: asked.experiences}
	result, err := client.Submit(waiting, asked.task, options)
	if result.Outcome == nil {
		return false, err
	}
	if shown := show(result); err == nil {
		err = shown
	}
	return result.Outcome.OK(), err
}

func show(result *trinitymq.Result) error {
	out := json.NewEncoder(os.Stdout)
	if err := out.Encode(result.Outcome); err != nil {
		return err
	}
	experiences, err := result.Experiences()
	if err != nil {
		return err
	}
	for number := range experiences {
		if err := out.Encode(&experiences[number]); err != nil {
			return err
		}
	}
	return nil
}
