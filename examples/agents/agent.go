// An agent in Go that is trained through the gateway, with nothing but HTTP from the standard library.
//
//	trinity-mq serve examples/serve.yaml
//	go run examples/agents/agent.go -sessions 4000
package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"math/rand"
	"net/http"
	"strings"
	"sync"
)

const atOnce = 12 // more, and it asks faster than two cores can train

var client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: atOnce}}

// post sends body as JSON and reads the answer into found.
func post(url, key string, body, found any) error {
	packed, err := json.Marshal(body)
	if err != nil {
		return err
	}
	request, err := http.NewRequest(http.MethodPost, url, bytes.NewReader(packed))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	if key != "" {
		request.Header.Set("Authorization", "Bearer "+key)
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode >= 300 {
		return fmt.Errorf("%s: %s: %s", url, response.Status, answer)
	}
	return json.Unmarshal(answer, found)
}

// session asks one question in a session of its own and returns what the answer was worth.
func session(gateway string) (float64, error) {
	digits := make([]string, 3)
	right := ""
	for i := range digits {
		digits[i] = fmt.Sprint(rand.Intn(10))
		right = max(right, digits[i])
	}
	var made struct {
		ID      string `json:"id"`
		BaseURL string `json:"base_url"`
		Key     string `json:"key"`
	}
	if err := post(gateway+"/sessions", "", struct{}{}, &made); err != nil {
		return 0, err
	}
	var answer struct {
		Choices []struct {
			Message struct {
				Content string `json:"content"`
			} `json:"message"`
			FinishReason string `json:"finish_reason"`
		} `json:"choices"`
	}
	asked := map[string]any{"messages": []any{map[string]string{"role": "user", "content": strings.Join(digits, ",") + "="}}}
	if err := post(made.BaseURL+"/chat/completions", made.Key, asked, &answer); err != nil {
		return 0, err
	}
	said, ended, worth := answer.Choices[0].Message.Content, answer.Choices[0].FinishReason == "stop", 0.0
	if strings.HasPrefix(said, right) {
		worth += 0.4
	}
	if ended && len(said) == 1 {
		worth += 0.1
	}
	if ended && said == right {
		worth = 1
	}
	return worth, post(gateway+"/s/"+made.ID+"/end", "", map[string]float64{"reward": worth}, &struct{}{})
}

func max(a, b string) string {
	if a > b {
		return a
	}
	return b
}

func main() {
	gateway := flag.String("url", "http://127.0.0.1:8710", "the gateway")
	sessions := flag.Int("sessions", 4000, "how many")
	flag.Parse()
	var lock sync.Mutex
	var done int
	var sum float64
	var group sync.WaitGroup
	left := make(chan struct{}, *sessions)
	for i := 0; i < *sessions; i++ {
		left <- struct{}{}
	}
	close(left)
	for i := 0; i < atOnce; i++ {
		group.Add(1)
		go func() {
			defer group.Done()
			for range left {
				worth, err := session(*gateway)
				if err != nil {
					log.Fatal(err)
				}
				lock.Lock()
				done, sum = done+1, sum+worth
				if done%500 == 0 {
					fmt.Printf("%d sessions, reward of the last 500: %.3f\n", done, sum/500)
					sum = 0
				}
				lock.Unlock()
			}
		}()
	}
	group.Wait()
}
